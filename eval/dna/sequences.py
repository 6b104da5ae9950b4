"""Labelled DNA sequences: reading FASTA and CSV files, and the reverse complement."""

import gzip
import io
import re
import zlib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pandas as pd

FASTA = (".fa", ".fasta", ".fna")
TABLES = {".csv": ",", ".tsv": "\t"}
GZIP, GZIP_MAGIC = ".gz", b"\x1f\x8b"
BASES = "ACGTN"
COMPLEMENT = str.maketrans("ACGTN", "TGCAN")
AMBIGUOUS = str.maketrans(dict.fromkeys("RYSWKMBDHV", "N"))  # IUPAC's letters for several bases
TEXT_COLUMNS = ("seq", "sequence")
PLACE_COLUMNS = ("region", "start", "end")
NAME_COLUMNS = ("name", "id")


class Place(NamedTuple):
    """Where a sequence lies: from `start` up to, and without, `end` of a region such as a chromosome."""

    region: str
    start: int
    end: int


class Sequences(NamedTuple):
    """Texts of A, C, G, T and N, their labels, their places where the file has them, and their names."""

    texts: list[str]
    labels: list[str]
    places: list[Place | None]
    names: list[str]

    def __add__(self, other: "Sequences") -> "Sequences":
        return Sequences(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def select(self, rows: Iterable[int]) -> "Sequences":
        rows = list(rows)
        return Sequences(*([column[row] for row in rows] for column in self))


def reverse_complement(text: str) -> str:
    """Returns the other strand in its own direction: A for T, C for G, from end to start; N stays N."""
    return text.translate(COMPLEMENT)[::-1]


def read_sequences(paths: Iterable[Path], labelled: bool = True) -> Sequences:
    """Reads FASTA files (.fa, .fasta, .fna) and tables (.csv, .tsv), also gzipped (.fa.gz), into one list.

    A table has the columns `seq` or `sequence` and `label`; `region`, `start` and `end` if it has places. A FASTA
    sequence has its label in its heading as `label=NAME`, or, in a file without such headings, in the file's name
    (positive.fa, negative.fa). A heading with REGION:START-END, as bedtools getfasta and samtools faidx write it, alone
    or after NAME:: or NAME and a space, has the place. A name is the first word of a heading; in a table, the column
    `name` or `id`, or the number of the row.

    labelled: False for sequences to be classified: a table then needs no labels, and a FASTA heading none.

    Raises ValueError, naming file and sequence, for a file that cannot be read, for a missing label or column, for an
    empty sequence, and for a letter that stands for no base.
    """
    found = Sequences([], [], [], [])
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is no file")
        suffix = path.with_suffix("").suffix if path.suffix.lower() == GZIP else path.suffix
        if suffix.lower() in FASTA:
            found += _checked(path, _read_fasta(path, labelled))
        elif suffix.lower() in TABLES:
            found += _checked(path, _read_table(path, TABLES[suffix.lower()], labelled))
        else:
            raise ValueError(f"{path} must end in {', '.join([*FASTA, *TABLES])}, or in these and {GZIP}")
    return found


def name_of(path: Path) -> str:
    """Returns the file's name without its suffixes."""
    return Path(path.stem).stem if path.suffix.lower() == GZIP else path.stem


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        if data.startswith(GZIP_MAGIC):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def _read_fasta(path: Path, labelled: bool) -> Sequences:
    lines = [line.strip() for line in _read_text(path).splitlines() if line.strip()]
    if not lines or not lines[0].startswith(">"):
        raise ValueError(f"{path} is no FASTA file: its first line must begin with '>'")
    headings, texts = [], []
    for is_heading, block in groupby(lines, lambda line: line.startswith(">")):
        if is_heading:
            headings += block
            texts += [""] * (len(headings) - len(texts))
        else:
            texts[-1] = "".join(block)
    found = [re.search(r"\blabel=(\S+)", heading) for heading in headings]
    if labelled and any(found) and not all(found):
        raise ValueError(f"{path}: sequence {found.index(None) + 1} has no label= in its heading, others have")
    labels = [match[1] if match else name_of(path) for match in found]
    names = [(heading[1:].split() or [str(number)])[0] for number, heading in enumerate(headings, 1)]
    return Sequences(texts, labels, list(map(_place_of, headings)), names)


def _place_of(heading: str) -> Place | None:
    found = re.search(r"(?:>|::|\s)([^\s:>]+):([\d,]+)-([\d,]+)(?=\([+-]\)|\s|$)", heading)
    return Place(found[1], *(int(number.replace(",", "")) for number in found.groups()[1:])) if found else None


def _read_table(path: Path, separator: str, labelled: bool) -> Sequences:
    try:
        table = pd.read_csv(io.StringIO(_read_text(path)), sep=separator, dtype=str, keep_default_na=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{path} is no table: {error}") from error
    text = next((name for name in TEXT_COLUMNS if name in table), None)
    if not labelled:
        table["label"] = "unknown"
    if text is None or "label" not in table:
        wanted = "label" if text else " or ".join(TEXT_COLUMNS)
        raise ValueError(f"{path} must have a column {wanted}, but has {', '.join(table.columns)}")
    if (table["label"] == "").any():
        raise ValueError(f"{path}: sequence {(table['label'] == '').argmax() + 1} has no label")
    places: list[Place | None] = [None] * len(table)
    if all(name in table for name in PLACE_COLUMNS):
        for name in ("start", "end"):
            wrong = ~table[name].str.fullmatch(r"\d+")
            if wrong.any():
                raise ValueError(f"{path}: {name} of sequence {wrong.argmax() + 1} must be a number of bases")
        places = [Place(region, int(a), int(b)) for region, a, b in table[list(PLACE_COLUMNS)].itertuples(index=False)]
    named = next((table[name] for name in NAME_COLUMNS if name in table), pd.Series(range(1, len(table) + 1)))
    return Sequences(table[text].tolist(), table["label"].tolist(), places, named.astype(str).tolist())


def _checked(path: Path, sequences: Sequences) -> Sequences:
    """Returns the sequences in capital letters, with N for the letters of several bases."""
    texts = [text.strip().upper().translate(AMBIGUOUS) for text in sequences.texts]
    if not texts:
        raise ValueError(f"{path} has no sequences")
    for number, text in enumerate(texts, 1):
        if not text:
            raise ValueError(f"{path}: sequence {number} is empty")
        wrong = re.search(f"[^{BASES}]", text)
        if wrong:
            raise ValueError(f"{path}: sequence {number} has {wrong[0]!r} at base {wrong.start() + 1}, no base of DNA")
    return sequences._replace(texts=texts)

"""Labelled DNA sequences: FASTA files and tables as data frames, and the reverse complement."""

import csv
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

FASTA = (".fa", ".fasta", ".fna")
TABLES = {".csv": ",", ".tsv": "\t"}
GZIP = ".gz"
BASES = "ACGTN"
COMPLEMENT = str.maketrans("ACGTN", "TGCAN")
AMBIGUOUS = str.maketrans(dict.fromkeys("RYSWKMBDHV", "N"))  # IUPAC's letters for several bases
PLACE = ["region", "start", "end"]
PLACE_IN_HEADING = r"(?:>|::|\s)(?P<region>[^\s:>]+):(?P<start>[\d,]+)-(?P<end>[\d,]+)(?=\([+-]\)|\s|$)"


def reverse_complement(text: str) -> str:
    """Returns the other strand in its own direction: A for T, C for G, from end to start; N stays N."""
    return text.translate(COMPLEMENT)[::-1]


def read_sequences(paths: Iterable[Path]) -> pd.DataFrame:
    """Reads FASTA files (.fa, .fasta, .fna) and tables (.csv, .tsv), also gzipped (.fa.gz), into one table.

    A table has the columns `seq` or `sequence` and `label`; `region`, `start` and `end` if it has places. A FASTA
    sequence has its label in its heading as `label=NAME`, or, in a file without such headings, in the file's name
    (positive.fa, negative.fa). A heading with REGION:START-END, as bedtools getfasta and samtools faidx write it, alone
    or after NAME:: or NAME and a space, has the place.

    Returns the columns seq, of A, C, G, T and N, and label; and region, start and end, missing where a file has none.

    Raises ValueError, naming file and sequence, for a file that cannot be read, for a missing label or column, for an
    empty sequence, and for a letter that stands for no base.
    """
    return pd.concat(map(_read_file, paths), ignore_index=True)


def name_of(path: Path) -> str:
    """Returns the file's name without its suffixes."""
    return Path(path.stem).stem if path.suffix.lower() == GZIP else path.stem


def _read_file(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    suffix = (path.with_suffix("") if path.suffix.lower() == GZIP else path).suffix.lower()
    if suffix not in (*FASTA, *TABLES):
        raise ValueError(f"{path} must end in {', '.join([*FASTA, *TABLES])}, or in these and {GZIP}")
    shared = {"dtype": str, "encoding": "utf-8-sig", "keep_default_na": False}
    try:
        if suffix in TABLES:
            table = pd.read_csv(path, sep=TABLES[suffix], **shared).rename(columns={"sequence": "seq"})
        else:  # a column of lines: no line has the separator
            lines = pd.read_csv(path, sep="\x1f", header=None, names=["line"], quoting=csv.QUOTE_NONE, **shared)["line"]
            table = _parse_fasta(lines.str.strip(), path)
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if missing := [name for name in ("seq", "label") if name not in table]:
        raise ValueError(f"{path} must have a column {missing[0]}, but has {', '.join(table.columns)}")
    table["seq"] = table["seq"].str.strip().str.upper().str.translate(AMBIGUOUS)
    if table.empty:
        raise ValueError(f"{path} has no sequences")
    patterns = {"seq": f"[{BASES}]+", "label": ".+"}
    if set(PLACE) <= set(table):
        table[PLACE[1:]] = table[PLACE[1:]].replace(",", "", regex=True)
        patterns |= dict.fromkeys(PLACE[1:], r"\d+")
    for name, pattern in patterns.items():
        good = table[name].isna() | table[name].str.fullmatch(pattern).eq(True)
        if not good.all():
            wrong = int(good.argmin())
            base = re.search(f"[^{BASES}]", table["seq"][wrong]) if name == "seq" else None
            found = f"{base[0]!r} at base {base.start() + 1}, no base of DNA" if base else repr(table[name][wrong])
            raise ValueError(f"{path}: {name} of sequence {wrong + 1} must match {pattern}, but has {found}")
    table[PLACE[1:]] = table.reindex(columns=PLACE[1:]).astype(float)
    return table.reindex(columns=["seq", "label", *PLACE])


def _parse_fasta(lines: pd.Series, path: Path) -> pd.DataFrame:
    """Returns the table of the lines of a FASTA file."""
    is_heading = lines.str.startswith(">")
    if lines.empty or not is_heading.iloc[0]:
        raise ValueError("it is no FASTA file: its first line must begin with '>'")
    headings, texts = lines[is_heading], lines[~is_heading].groupby(is_heading.cumsum()).agg("".join)
    table = headings.str.extract(PLACE_IN_HEADING).reset_index(drop=True)
    table["seq"] = texts.reindex(range(1, len(headings) + 1), fill_value="").to_numpy()
    labels = headings.str.extract(r"\blabel=(\S+)")[0].reset_index(drop=True)
    if labels.isna().all():
        labels[:] = name_of(path)
    table["label"] = labels.fillna("")
    return table

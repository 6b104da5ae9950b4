"""eval.dna: the tokenizer, the other strand, files and folds of DNA sequences, by hand."""

import gzip

import numpy as np
import pandas as pd
import pytest
from covering import in_one_test
from dna_files import random_text
from transformers import AutoTokenizer

from eval.dna import folds as dna_folds
from eval.dna.folds import group_sequences, make_folds
from eval.dna.sequences import PLACE, read_sequences, reverse_complement
from eval.dna.tokenizer import make_tokenizer


def test_a_token_is_a_base(tmp_path):
    """Each base is a token of its own, in either case; what is no base is N; an end follows; a saved tokenizer is the
    same.
    """
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for made in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert made.convert_ids_to_tokens(range(len(made))) == ["[PAD]", "[EOS]", "A", "C", "G", "T", "N"]
        assert made("ACGTN").input_ids == [2, 3, 4, 5, 6, 1]
        assert made("acgtnR-").input_ids == [2, 3, 4, 5, 6, 6, 6, 1]
        assert made(["A", "GT"], padding=True).input_ids == [[2, 1, 0], [4, 5, 1]]
        assert made.decode([2, 3, 4, 5, 6, 1], skip_special_tokens=True) == "ACGTN"
        assert set(made("A")) == {"input_ids", "attention_mask"}


def test_reverse_complement_by_hand():
    """The other strand is read backwards; twice gives the first."""
    assert reverse_complement("AACGTN") == "NACGTT"
    text = random_text(np.random.default_rng(0), 50)
    assert reverse_complement(reverse_complement(text)) == text != reverse_complement(text)


def test_tables_are_read(tmp_path):
    """A table is read with both names of the column and either separator, with small letters, letters of several bases,
    and places.
    """
    (tmp_path / "a.tsv").write_text("seq\tlabel\nacgt\t0\nRACN\t1\n")
    (tmp_path / "b.csv").write_text('region,start,end,label,sequence\nchr1,"1,003",7,x,AAAA\n')
    found = read_sequences([tmp_path / "a.tsv", tmp_path / "b.csv"])
    assert found["seq"].tolist() == ["ACGT", "NACN", "AAAA"] and found["label"].tolist() == ["0", "1", "x"]
    assert found[PLACE].dropna().values.tolist() == [["chr1", 1003, 7]]


@in_one_test(
    "form",
    [
        "chr1:{a}-{b}",
        "chr1:{a}-{b}(+)",
        "enh{i}::chr1:{a}-{b}",
        "enh{i}::chr1:{a}-{b}(-)",
        "enh{i} chr1:{a}-{b} label=1",
        "chr1:{a:,}-{b:,} label=1",
    ],
)
def test_fasta_files_are_read(form, tmp_path):
    """Lines of a sequence are joined, and the label is in the heading or is the file's name. Overlapping places are a
    group, however bedtools or samtools write the heading.
    """
    generator = np.random.default_rng(0)
    spans, texts = [(1100, 1200), (1180, 1280), (1500, 1600)], [random_text(generator, 100) for _ in range(3)]
    lines = [
        f">{form.format(a=a, b=b, i=i)}\n{texts[i][:60].lower()}\n{texts[i][60:]}\n\n" for i, (a, b) in enumerate(spans)
    ]
    (tmp_path / "positive.fa").write_text("".join(lines))
    found = read_sequences([tmp_path / "positive.fa"])
    assert found["seq"].tolist() == texts and set(found["label"]) == {"1" if "label" in form else "positive"}
    assert list(map(tuple, found[PLACE].to_numpy())) == [("chr1", *span) for span in spans]
    assert group_sequences(found).tolist() == [0, 0, 1]


def test_gzipped_files_and_byte_order_marks_are_read(tmp_path):
    """Files are read as they are downloaded and exported; the label of positive.fa.gz is positive."""
    fasta, table = ">x\nAC\n>y\nGT\n", "seq,label\nAC,1\nGT,0\n"
    for name, text, labels in (("positive.fa", fasta, ["positive"] * 2), ("x.csv", table, ["1", "0"])):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode("utf-8-sig")))
        for file in (tmp_path / name, tmp_path / f"{name}.gz"):
            assert read_sequences([file])[["seq", "label"]].to_dict("list") == {"seq": ["AC", "GT"], "label": labels}


@in_one_test(
    "name,content,message",
    [
        *((name, b">caf\xe9\nAC\n", rf"{name} cannot be read: .*utf-8") for name in ("x.fa", "x.csv")),
        *((f"x.{x}.gz", gzip.compress(b">x\nAC\n" * 99, mtime=0)[:-9], r"\.gz cannot be read") for x in ("fa", "csv")),
        ("a.tsv", "seq\tlabel\nACGT\t0\nACXT\t1\n", r"a\.tsv: seq of sequence 2 .* 'X' at base 3, no base of DNA"),
        ("a.tsv", "seq\tlabel\nACGT\t0\n\t1\n", r"a\.tsv: seq of sequence 2 must match .* but has ''"),
        ("a.tsv", "seq\tlabel\nACGT\t\n", r"a\.tsv: label of sequence 1 must match"),
        ("a.tsv", "seq\tlabel\n", r"a\.tsv has no sequences"),
        ("a.tsv", "seq\tclass\nACGT\t1\n", r"a\.tsv must have a column label, but has seq, class"),
        ("a.csv", "seq\tlabel\nACGT\t1\n", r"a\.csv must have a column seq, but has seq\tlabel"),
        ("a.csv", "", r"a\.csv cannot be read"),
        ("a.csv", "seq,label,region,start,end\nA,0,c,1,x\n", r"end of sequence 1 must match \\d\+, but has 'x'"),
        ("a.fa", "ACGT\n", r"a\.fa cannot be read: it is no FASTA file"),
        ("a.fa", ">x label=1\nA\n>y\nC\n", r"a\.fa: label of sequence 2 must match"),
        ("a.fa", ">x\n>y\nC\n", r"a\.fa: seq of sequence 1 must match"),
        ("a.doc", "ACGT", r"a\.doc must end in \.fa"),
        (None, None, "is no file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    """File, sequence and base are named; a file in another encoding or cut off is named too."""
    if name:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_sequences([tmp_path / (name or "none.fa")])


def table_of(texts: list[str], labels: list[str] | None = None, places: list | None = None) -> pd.DataFrame:
    table = pd.DataFrame({"seq": texts, "label": labels or ["0"] * len(texts)})
    table[PLACE] = places or [(None, np.nan, np.nan)] * len(texts)
    return table


def groups_of(texts: list[str], places: list | None = None) -> list[int]:
    return group_sequences(table_of(texts, places=places)).tolist()


def test_groups_by_hand():
    """32 bases in common join two sequences, 31 do not; so does the other strand; what joins two joins their groups; N
    stands for no base in common.
    """
    generator = np.random.default_rng(0)
    long = random_text(generator, 200)
    other = [random_text(generator, 40) for _ in range(6)]
    texts = [
        long[:100],
        other[0] + long[68:100],  # 32 in common with the first
        reverse_complement(long[90:140]) + other[1],
        long[100:132] + other[2],  # 32 in common with the one before, on the other strand
        long[:31] + other[3],  # 31 in common with the first
        long[100:131] + "N" + other[4],
        other[5],
    ]
    assert groups_of(texts) == [0, 0, 1, 1, 2, 3, 4]
    assert groups_of([*texts, long[60:140]]) == [0, 0, 0, 0, 1, 2, 3, 0]


def test_equal_short_sequences_are_a_group():
    """Sequences shorter than 32 are joined when they are equal on either strand, N included."""
    assert groups_of(["AACC", "GGTT", "AACG", "AANC", "GNTT"]) == [0, 0, 1, 2, 2]
    assert groups_of(["A"]) == [0]


def test_overlapping_places_by_hand():
    """Places that have a base in common join, in one region; a long one joins all within it; touching ones do not."""
    starts = [(0, 100), (10, 20), (90, 120), (119, 130), (130, 140), (50, 60)]
    places = [("chr1", *x) for x in starts] + [("chr2", 0, 100), (None, np.nan, np.nan)]
    texts = [random_text(np.random.default_rng(i), 50) for i in range(len(places))]
    assert groups_of(texts, places) == [0, 0, 0, 0, 1, 0, 2, 3]


def overlapping_sequences(number: int) -> pd.DataFrame:
    """Windows of 60 in steps of 20 of one long text, on either strand, and as many random ones, in random order."""
    generator = np.random.default_rng(0)
    texts = [random_text(generator, 60) for _ in range(number)]
    for _ in range(number // 4):
        long = random_text(generator, 120)
        texts += [long[:60], reverse_complement(long[20:80]), long[40:100], long[60:]]
    order = generator.permutation(len(texts)).tolist()
    texts = [texts[i] for i in order]
    return table_of(texts, [str(i % 2) for i in range(len(texts))])


def stretches(texts: list[str]) -> set[str]:
    both = [*texts, *map(reverse_complement, texts)]
    return {text[i : i + dna_folds.K] for text in both for i in range(len(text) - dna_folds.K + 1)}


def test_no_stretch_is_on_both_sides_of_a_split():
    """Training, validation and test part share no stretch, by comparing all of them. Every sequence is tested once, and
    the shares of labels are alike.
    """
    sequences = overlapping_sequences(200)
    folds = make_folds(sequences, 5)
    assert sorted(np.concatenate([fold.test for fold in folds]).tolist()) == list(range(400))
    for fold in folds:
        assert sorted(np.concatenate(fold).tolist()) == list(range(400))
        parts = [stretches(sequences["seq"][rows].tolist()) for rows in fold]
        assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
        assert 70 <= len(fold.test) <= 90 and 25 <= len(fold.valid) <= 40
        assert 0.4 < (sequences["label"][fold.test] == "1").mean() < 0.6
    for fold, again in zip(folds, make_folds(sequences, 5), strict=True):
        assert all(map(np.array_equal, fold, again))


def test_too_few_groups_are_refused():
    """A class with fewer groups than folds is an error."""
    sequences = overlapping_sequences(40).assign(label=["1"] * 3 + ["0"] * 77)
    with pytest.raises(ValueError, match="--folds 5: 5 parts need as many groups of sequences in each class"):
        make_folds(sequences, 5)

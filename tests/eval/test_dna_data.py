"""eval.dna: the other strand, files and folds of DNA sequences, by hand."""

import gzip

import numpy as np
import pandas as pd
import pytest
from covering import in_one_test
from dna_files import random_text

from eval.dna import folds as dna_folds
from eval.dna.folds import group_sequences, make_folds
from eval.dna.sequences import read_sequences, reverse_complement


def test_reverse_complement_by_hand():
    """The other strand is read backwards; twice gives the first."""
    assert reverse_complement("AACGTN") == "NACGTT"
    text = random_text(np.random.default_rng(0), 50)
    assert reverse_complement(reverse_complement(text)) == text != reverse_complement(text)


def test_tables_are_read(tmp_path):
    """A table is read with either separator, other columns, small letters, a byte order mark, and gzipped."""
    (tmp_path / "a.tsv").write_text("seq\tlabel\nacgt\t0\n")
    (tmp_path / "b.csv").write_text("region,label,seq\nchr1,x,AAAA\n", encoding="utf-8-sig")
    (tmp_path / "c.tsv.gz").write_bytes(gzip.compress(b"seq\tlabel\nNACN\t1\n"))
    found = read_sequences(tmp_path / name for name in ("a.tsv", "b.csv", "c.tsv.gz"))
    assert found.to_dict("list") == {"seq": ["ACGT", "AAAA", "NACN"], "label": ["0", "x", "1"]}


@in_one_test(
    "name,content,message",
    [
        ("x.csv", b"seq,label\ncaf\xe9,1\n", r"x\.csv cannot be read: .*utf-8"),
        ("x.csv.gz", gzip.compress(b"seq,label\n" + b"AC,1\n" * 99, mtime=0)[:-9], r"x\.csv\.gz cannot be read"),
        ("a.tsv", b"seq\tlabel\nACGT\t0\nACXT\t1\n", r"a\.tsv: .* letters of ACGTN, but sequence 2 is .*ACXT"),
        ("a.tsv", b"seq\tlabel\nACGT\t0\n\t1\n", r"a\.tsv: .* sequence 2 is .*''"),
        ("a.tsv", b"seq\tlabel\nACGT\t\n", r"a\.tsv: .* sequence 1 is .*'label': ''"),
        ("a.tsv", b"seq\tlabel\n", r"a\.tsv: .* it has none"),
        ("a.tsv", b"seq\tclass\nACGT\t1\n", r"a\.tsv cannot be read: .*label"),
        ("a.csv", b"", r"a\.csv cannot be read"),
        ("a.fa", b">x label=1\nACGT\n", r"a\.fa cannot be read: .*seq"),
        (None, None, r"none\.tsv cannot be read"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    """File and sequence are named; a file in another encoding or cut off is named too."""
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        read_sequences([tmp_path / (name or "none.tsv")])


def table_of(texts: list[str], labels: list[str] | None = None) -> pd.DataFrame:
    return pd.DataFrame({"seq": texts, "label": labels or ["0"] * len(texts)})


def test_groups_by_hand():
    """32 bases in common join two sequences, 31 do not; so does the other strand; what joins two joins their groups; N
    stands for no base in common. Sequences shorter than 32 are joined when they are equal on either strand, N included.
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
    assert group_sequences(table_of(texts)).tolist() == [0, 0, 1, 1, 2, 3, 4]
    assert group_sequences(table_of([*texts, long[60:140]])).tolist() == [0, 0, 0, 0, 1, 2, 3, 0]
    assert group_sequences(table_of(["AACC", "GGTT", "AACG", "AANC", "GNTT"])).tolist() == [0, 0, 1, 2, 2]
    assert group_sequences(table_of(["A"])).tolist() == [0]


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
    the shares of labels are alike. A class with fewer groups than folds is an error.
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
    with pytest.raises(ValueError, match="--folds 5: 5 parts need as many groups of sequences in each class"):
        make_folds(overlapping_sequences(40).assign(label=["1"] * 3 + ["0"] * 77), 5)

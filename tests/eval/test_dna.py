"""eval.dna: files and folds by hand, models, runs that go on, tables."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from eval import tables
from eval.common.records import FILE, append_record, read_records
from eval.dna import run as dna
from eval.dna.models import NAMES, build_model
from eval.dna.run import collate
from eval.dna.sequences import K, group_sequences, make_folds, read_sequences, reverse_complement
from eval.dna.tables import make_report

SHAPE = {"parameters": 30_000, "hidden_size": 32, "num_hidden_layers": 2}
TINY = ["--parameters", "4000", "--hidden_size", "16", "--num_hidden_layers", "1", "--folds", "2"]
DATA = "human_nontata_promoters-test"
PUBLISHED = read_records(Path(tables.__file__).parent / "results" / "dna.jsonl", "dna")[0]
SHARES = {"negative": (0.55, 0.15, 0.15, 0.15), "positive": (0.15, 0.55, 0.15, 0.15)}  # rich in A, and in C


def random_text(generator: np.random.Generator, length: int, shares: tuple[float, ...] = (0.25,) * 4) -> str:
    return "".join(generator.choice(list("ACGT"), length, p=shares))


@pytest.fixture
def tsv(tmp_path):
    """A file of 100 sequences of 40 bases, whose composition gives the class away."""
    generator, file = np.random.default_rng(0), tmp_path / "data" / "bases.tsv"
    file.parent.mkdir()
    rows = [f"{random_text(generator, 40, SHARES[x])}\t{x}\n" for _ in range(50) for x in SHARES]
    file.write_text("seq\tlabel\n" + "".join(rows))
    return file


def command(tsv, *options):
    rates = ["--learning_rates", "1e-2", "--epochs", "1", "--output", str(tsv.parents[1] / "out")]
    return [str(tsv), *TINY, *rates, *map(str, options)]


def test_tables_are_read(tmp_path):
    """Tables are read in all their forms. A bad sequence is named."""
    (tmp_path / "b.csv").write_text("region,label,seq\nchr1,x,aaNA\n", encoding="utf-8-sig")
    (tmp_path / "c.tsv.gz").write_bytes(gzip.compress(b"seq\tlabel\nNACN\t1\n"))
    found = [read_sequences(tmp_path / name).to_dict("list") for name in ("b.csv", "c.tsv.gz")]
    assert found == [{"seq": ["AANA"], "label": ["x"]}, {"seq": ["NACN"], "label": ["1"]}]
    for content, message in (
        (b"seq,label\nACGT,0\nACXT,1\n", "letters of ACGTN, but sequence 2 is .*ACXT"),
        (b"seq,label\nACGT,\n", "sequence 1 is .*'label': ''"),
    ):
        (tmp_path / "x.csv").write_bytes(content)
        with pytest.raises(ValueError, match=rf"(?s)x\.csv.*{message}"):
            read_sequences(tmp_path / "x.csv")


def table_of(texts: list[str]) -> pd.DataFrame:
    return pd.DataFrame({"seq": texts, "label": [str(i % 2) for i in range(len(texts))]})


def test_groups_by_hand():
    """Two sequences with 32 bases in common on any strand, or equal short ones, are of one group; N is in none."""
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


def test_no_stretch_is_on_both_sides_of_a_split():
    """Training, validation and test part share no stretch, every sequence is tested once, and labels are alike."""
    generator, texts = np.random.default_rng(0), []
    for _ in range(100):
        long = random_text(generator, 120)
        texts += [long[:60], reverse_complement(long[20:80]), long[40:100], random_text(generator, 60)]
    sequences = table_of([texts[i] for i in generator.permutation(400)])
    folds = make_folds(sequences, 5)
    assert sorted(np.concatenate([test for *_, test in folds]).tolist()) == list(range(400))
    for fold in folds:
        assert sorted(np.concatenate(fold).tolist()) == list(range(400))
        texts = [[y for x in sequences["seq"][rows] for y in (x, reverse_complement(x))] for rows in fold]
        parts = [{x[i : i + K] for x in of_part for i in range(len(x) - K + 1)} for of_part in texts]
        assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
        _, valid, test = fold
        assert 70 <= len(test) <= 90 and 25 <= len(valid) <= 40
        assert 0.4 < (sequences["label"][test] == "1").mean() < 0.6


@pytest.mark.parametrize("name", NAMES)
def test_models_are_of_one_size_and_padding_changes_nothing(name):
    """All but the CNN have about the parameters asked for, and a shorter sequence is classified in a batch as alone."""
    torch.manual_seed(0)
    model = build_model(name, 3, 61, SHAPE, {}).eval()
    if name != "cnn":
        assert abs(sum(x.numel() for x in model.parameters()) / SHAPE["parameters"] - 1) < 0.1
    batch = [{"seq": "ACGT" * 15, "labels": 0}, {"seq": "GATTACA", "labels": 0}]
    with torch.no_grad():
        together, alone = (model(**collate(x)).logits for x in (batch, batch[1:]))
    assert together.shape == (2, 3)
    torch.testing.assert_close(together[1:], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_runs_learn_and_go_on(tsv, capsys):
    """Composition is learned to nearly all of the test sequences."""
    options = command(tsv, "--models", "lmm", "mamba2", "--epochs", "6", "--learning_rates", "1e-2", "3e-2")
    dna.main(options)
    out = tsv.parents[1] / "out"
    assert [record["fold"] for record in (x["run"] for x in read_records(out, "dna"))] == [0, 0, 1, 0, 0, 1]
    assert np.mean([record["test"] for record in read_records(out, "dna")]) > 0.8
    assert "| mamba2 |" in capsys.readouterr().out


def test_the_rate_is_chosen_on_the_first_fold(tsv, monkeypatch, capsys):
    """All folds and seeds, and the tables, have the rate that is best in validation on the first fold and seed."""
    made = []

    def train(run, *data):
        made.append((run.seed, run.fold, run.learning_rate))
        return {"parameters": 1, "valid": -abs(run.learning_rate - 0.02), "test": run.learning_rate}

    monkeypatch.setattr(dna, "train", train)
    options = command(tsv, "--models", "lmm", "--learning_rates", "0.01", "0.02", "0.03", "--seeds", "3", "1")
    dna.main(options[:-1])
    dna.main(options)  # goes on with the runs that are there
    assert made[:3] == [(3, 0, 0.01), (3, 0, 0.02), (3, 0, 0.03)]
    assert made[3:] == [(3, 1, 0.02), (1, 0, 0.02), (1, 1, 0.02)]
    assert "| lmm | 1 | 2 | 2.0 ± 0.0 |" in capsys.readouterr().out


def save(folder, row, fold, test, seed=0):
    """Appends a published record with another row, fold and score."""
    run = {"data": DATA, "row": row, "model": row, "learning_rate": 0.01, "fold": fold, "seed": seed}
    record = PUBLISHED | {"name": f"{row}-{fold}-{seed}", "run": PUBLISHED["run"] | run, "test": test}
    append_record(record | {"valid": 0.9, "parameters": 1234, "minutes": 2.0}, folder / FILE)


def test_figures_are_over_folds(tmp_path):
    """The spread is over folds, each the mean of its seeds; differences are of equal seed and fold."""
    for row, scores in {"cnn": {0: (0.6, 0.8), 1: (0.8, 0.8)}, "lmm": {0: (0.7, 0.9), 1: (0.72,), 2: (0.85,)}}.items():
        for fold, of_seeds in scores.items():
            for seed, score in enumerate(of_seeds):
                save(tmp_path, row, fold, score, seed)
    _, heading, rows, less = make_report(read_records(tmp_path, "dna"), ["cnn"])
    assert heading == f"## {DATA}"
    assert rows.splitlines()[2] == "| cnn | 1,234 | 2 | 75.0 ± 7.1 | 90.0 ± 0.0 | 0.01 | 2.0 |"  # folds .7, .8
    assert rows.splitlines()[3] == "| lmm | 1,234 | 3 | 79.0 ± 6.6 | 90.0 ± 0.0 | 0.01 | 2.0 |"  # folds .8, .72, .85
    assert "| the paper's neural memory | – | – | 96.6 | – | – | – |" in rows
    assert less.splitlines()[2:] == ["| lmm | +1.0 ± 12.7 | 2 |"]  # .1 and .1 in the first fold, -.08 in the second
    with pytest.raises(ValueError, match="--baselines must be of cnn, lmm, but have llama"):
        tables.main([str(tmp_path), "--baselines", "llama"])

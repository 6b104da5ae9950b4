"""eval/dna/tables.py: figures are those of the folds, at the rate that the first fold's validation part chose."""

from pathlib import Path

import pytest

from eval import tables
from eval.common.records import append_record, read_records
from eval.dna.tables import differences, results_of, table

DATA = "human_nontata_promoters-test"
PUBLISHED = read_records(Path(tables.__file__).parent / "results" / "dna.jsonl", "dna")[0]


def read_results(folder):
    return results_of(read_records(folder, "dna"))


def save(folder, model, rate, fold, valid, test, data=DATA, seed=0, **changed):
    """Appends a published record with another model, rate, fold and score."""
    run = {"data": data, "row": model, "model": model, "learning_rate": rate, "fold": fold, "seed": seed} | changed
    scores = {"valid": valid, "test": test, "parameters": 1234, "minutes": 2.0}
    about = {"name": f"{data}-{model}-{rate}-{fold}-{seed}", "run": PUBLISHED["run"] | run}
    append_record(PUBLISHED | about | scores, folder / "runs.jsonl")


@pytest.fixture
def folder(tmp_path):
    """Two models, two rates on the first fold; the worse rate in validation is the better one in test."""
    save(tmp_path, "cnn", 1e-3, 0, valid=0.7, test=0.9)
    save(tmp_path, "cnn", 1e-2, 0, valid=0.8, test=0.6)
    save(tmp_path, "cnn", 1e-2, 1, valid=0.6, test=0.8)
    save(tmp_path, "lmm", 1e-3, 0, valid=0.9, test=0.7)
    save(tmp_path, "lmm", 1e-3, 1, valid=0.9, test=0.7)
    save(tmp_path, "lmm", 1e-3, 2, valid=0.9, test=0.85)
    return tmp_path


def test_the_rate_is_chosen_by_validation_and_folds_are_averaged(folder):
    """The learning rate with the best validation is chosen, and its test scores are averaged over folds. The paper
    stands beside its own data only, and a figure that it does not have is left out.
    """
    for data in ("mine", "human_enhancers_ensembl-test"):
        save(folder, "cnn", 1e-3, 0, 0.5, 0.5, data=data)
    results = read_results(folder)
    lines = table(DATA, results[DATA]).splitlines()
    assert lines[2] == "| lmm | 1,234 | 3 | 75.0 ± 8.7 | 75.0 | 90.0 ± 0.0 | 0.001 | 2.0 |"
    assert lines[3] == "| cnn | 1,234 | 2 | 70.0 ± 14.1 | 70.0 | 70.0 ± 14.1 | 0.01 | 2.0 |"
    assert "| the paper's neural memory | – | – | 96.6 | – | – | – | – |" in lines and len(lines) == 4 + 8
    text = table("human_enhancers_ensembl-test", results["human_enhancers_ensembl-test"])
    assert "the paper's Mamba " not in text and "| the paper's HyenaDNA | – | – | 89.2 |" in text
    assert table("mine", results["mine"]).splitlines()[2:] == ["| cnn | 1,234 | 1 | 50.0 | 50.0 | 50.0 | 0.001 | 2.0 |"]


def test_a_fold_is_the_mean_of_its_seeds(folder):
    """The spread is over folds, each the mean of its seeds, and differences are of equal seed and fold; a seed without
    all folds has no mean of its own; the first seed chose the rate.
    """
    save(folder, "cnn", 1e-2, 0, 0.1, test=0.8, seed=1)
    save(folder, "cnn", 1e-2, 1, 0.1, test=0.8, seed=1)
    save(folder, "lmm", 1e-3, 0, 0.1, test=0.9, seed=1)
    save(folder, "cnn", 1e-3, 0, 0.9, test=0.1, seed=1)
    rows = read_results(folder)[DATA]
    lines = table(DATA, rows).splitlines()
    assert lines[2].startswith("| lmm | 1,234 | 3 | 78.3 ± 7.6 | 75.0 |")  # folds .8, .7, .85
    assert lines[3].startswith("| cnn | 1,234 | 2 | 75.0 ± 7.1 | 70.0, 80.0 |")  # folds .7, .8
    # lmm less cnn: .1 and .1 in the first fold, -.1 in the second
    assert differences(rows, "cnn").splitlines()[2:] == ["| lmm | +0.0 ± 14.1 | +0.0 | 2 |"]


def test_rows_that_have_no_rate_and_rows_not_made_alike(folder, capsys):
    """Of two rates that are equal in validation, the one with more folds is the row. A row without the first fold has
    no rate and is left out. Runs with other settings, and an unknown baseline, raise an error.
    """
    for rate, fold in ((1e-3, 0), (1e-2, 0), (1e-2, 1)):
        save(folder, "mag", rate, fold, 0.7, rate)
    save(folder, "mac", 1e-3, 1, 0.9, 0.9)
    rows = read_results(folder)[DATA]
    assert rows["mag"]["test"].tolist() == [1e-2, 1e-2] and "mac" not in rows
    tables.main([str(folder), "--baselines", "cnn"])
    text = capsys.readouterr().out
    assert f"## {DATA}" in text and "| less cnn | accuracy | each seed | folds |" in text
    with pytest.raises(ValueError, match="--baselines must be of cnn, lmm, mac, mag, but has llama"):
        tables.main([str(folder), "--baselines", "llama"])
    save(folder, "mag", 1e-3, 2, 0.9, 0.9, epochs=3)
    with pytest.raises(ValueError, match=r", mag: epochs is 3, elsewhere 1"):
        tables.main([str(folder)])

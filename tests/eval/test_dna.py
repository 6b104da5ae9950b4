"""eval.dna: models, training and its records, runs that go on, files to train and to test on, bad options."""

import random
import re

import numpy as np
import pandas as pd
import pytest
import torch
from covering import in_one_test
from dna_files import write_table

from eval.common.records import FILE, read_records
from eval.dna import run as dna
from eval.dna.models import NAMES, build_model, config_of
from eval.dna.sequences import END, PAD, TOKENS, tokenize
from eval.dna.training import DataOfRun, collate

SHAPE = {"parameters": 30_000, "hidden_size": 32, "num_hidden_layers": 2}
TINY = ["--parameters", "4000", "--hidden_size", "16", "--num_hidden_layers", "1", "--folds", "2", "--evaluations", "2"]


@pytest.fixture
def tsv(tmp_path):
    (tmp_path / "data").mkdir()
    return write_table(tmp_path / "data" / "bases.tsv", number=100)


def command(tsv, *options):
    rates = ["--learning_rates", "1e-2", "--epochs", "1", "--output", str(tsv.parents[1] / "out")]
    return [str(tsv), *TINY, *rates, *map(str, options)]


@pytest.mark.parametrize("name", NAMES)
def test_models_are_of_one_size_and_padding_changes_nothing(name):
    """All but the CNN have about the parameters asked for, and a shorter sequence is classified in a batch as alone."""
    torch.manual_seed(0)
    config = config_of(name, ["a", "b", "c"], SHAPE, {})
    model = build_model(name, config, 61).eval()
    if name != "cnn":
        assert abs(sum(x.numel() for x in model.parameters()) / SHAPE["parameters"] - 1) < 0.1
        assert config.id2label[2] == "c"
    texts = ["ACGT" * 15, "GATTACA"]
    with torch.no_grad():
        together, alone = (
            model(**collate([{"seq": text, "labels": 0, "augment": False} for text in batch])).logits
            for batch in (texts, texts[1:])
        )
    assert together.shape == (2, 3)
    if name != "lmm-off":  # its only mixers, convolutions into a constant memory, return next to nothing at first
        assert not torch.equal(together[0], together[1])
    torch.testing.assert_close(together[1:], alone, atol=1e-5, rtol=1e-4)


def test_the_cnn_cuts_long_sequences():
    """Tokens beyond the length are not read."""
    model = build_model("cnn", config_of("cnn", ["0", "1"], SHAPE, {}), 60).eval()
    ids = torch.randint(2, 6, (1, 80))
    torch.testing.assert_close(model(ids).logits, model(ids[:, :60]).logits)
    with pytest.raises(ValueError, match="the model cnn needs longer sequences than 30 bases"):
        build_model("cnn", config_of("cnn", ["0", "1"], SHAPE, {}), 31)


@pytest.mark.parametrize("variant", ["lmm", "mac"])
def test_a_model_with_memory_off_is_the_same_but_for_its_memory(variant):
    """A model with memory off differs from the other in the size of its steps alone, which is 0."""
    configs = [config_of(name, ["0", "1"], SHAPE, {}).to_dict() for name in (variant, f"{variant}-off")]
    assert configs[0].pop("memory_max_lr") > 0 and configs[1].pop("memory_max_lr") == 0
    assert configs[0] == configs[1]


def test_augmentation_draws_either_strand():
    """Both strands of every sequence come, with the same label, and only where asked for."""
    texts = ["AACC", "CCGA", "ACAC"]
    sequences = pd.DataFrame({"seq": texts, "label": ["x", "y", "x"]})
    data = DataOfRun(sequences, ["x", "y"], ())
    base_of = {token: base for base, token in TOKENS.items()} | {PAD: "", END: ""}
    random.seed(0)
    batches = [collate(data.examples([2, 1], augment=True)) for _ in range(40)]
    drawn = [
        ("".join(map(base_of.get, ids)), label)
        for x in batches
        for ids, label in zip(x["input_ids"].tolist(), x["labels"].tolist(), strict=True)
    ]
    assert set(drawn) == {("ACAC", 0), ("GTGT", 0), ("CCGA", 1), ("TCGG", 1)}
    assert 10 < sum(text == "GTGT" for text, _ in drawn) < 30
    plain = collate(data.examples([2, 1]))
    assert plain["input_ids"].tolist() == [tokenize("ACAC"), tokenize("CCGA")]


@pytest.mark.slow
def test_runs_learn_and_go_on(tsv, capsys):
    """Composition is learned to nearly all of the test sequences; all a run depends on is recorded; the same command
    makes nothing again.
    """
    options = command(tsv, "--models", "lmm", "mamba2", "--epochs", "6", "--learning_rates", "1e-2", "3e-2")
    dna.main(options)
    out = tsv.parents[1] / "out"
    records = read_records(out, "dna")
    assert len(records) == 6  # two rates on the first fold, the better on the other
    assert np.mean([record["test"] for record in records]) > 0.8
    for record in records:
        assert record["sequences"]["test"] == 50 and record["commit"] == records[0]["commit"]
        assert record["valid"] == max(row[3] for row in record["curve"]) and record["curve"][-1][0] == 6
        assert next(row[3] for row in record["curve"] if row[0] == record["best_epoch"]) == record["valid"]
        assert record["config"]["vocab_size"] == 7 and record["run"]["data"] == "data-bases"
    written = (out / FILE).read_text()
    capsys.readouterr()
    dna.main(options)
    printed = capsys.readouterr().out
    assert "epoch " not in printed and "| mamba2 |" in printed
    assert (out / FILE).read_text() == written


def test_the_rate_is_chosen_on_the_first_fold(tsv, monkeypatch):
    """The other folds and seeds have the rate that is best in validation on the first fold with the first seed,
    whatever it scores on the test part.
    """
    made = []

    def make(run, data, output):
        made.append((run.seed, run.fold, run.learning_rate))
        return {"valid": -abs(run.learning_rate - 0.02), "test": run.learning_rate, "minutes": 0}

    monkeypatch.setattr(dna, "make_run", make)
    monkeypatch.setattr(dna.tables, "make_report", lambda *_: [])  # the runs leave no record
    dna.main(command(tsv, "--models", "lmm", "--folds", "2", "--learning_rates", "0.01", "0.02", "0.03"))
    assert made == [(0, 0, 0.01), (0, 0, 0.02), (0, 0, 0.03), (0, 1, 0.02)]
    made.clear()
    dna.main(command(tsv, "--models", "lmm", "--learning_rates", "0.01", "0.02", "--seeds", "3", "1"))
    assert made == [(3, 0, 0.01), (3, 0, 0.02), (3, 1, 0.02), (1, 0, 0.02), (1, 1, 0.02)]


def test_files_to_train_and_to_test_on(tsv, capsys):
    """All test sequences are tested, none is trained on, and those that overlap are counted."""
    test = write_table(tsv.parent / "test.tsv", number=20, seed=5)
    test.write_text(test.read_text() + tsv.read_text().splitlines()[1] + "\n")
    files = ["--train", str(tsv), "--test", str(test), "--models", "lmm", "--reverse_complement"]
    dna.main([*files, *command(tsv)[1:]])
    assert "1 of 21 test sequences overlap" in capsys.readouterr().out
    (record,) = read_records(tsv.parents[1] / "out", "dna")
    assert record["sequences"] == {"train": 90, "valid": 10, "test": 21} and record["run"]["reverse_complement"]


@in_one_test(
    "options,message",
    [
        (["--epochs", "0"], "--epochs must be at least 1, but is 0"),
        (["--learning_rates", "0"], "--learning_rates must be above 0, but has 0.0"),
        (["--folds", "1"], "--folds must be at least 2, but is 1"),
        (["--folds", "51"], "--folds 51: 51 parts need as many groups"),
        (["--test", "x.tsv"], "give either DATA files, or --train and --test files"),
        (["--train", "x.tsv", "--test", "x.tsv"], "give either DATA files, or --train and --test files"),
        (["--set", "memory_dept=2", "--label", "x"], "--set memory_dept: TitansConfig has no such field"),
        (["--set", "memory_depth=0", "--label", "x"], "the model lmm: .*memory_depth"),
        (["--models", "lmm", "--hidden_size", "15", "--set", "memory_num_heads=2", "--label", "x"], "hidden_size"),
    ],
)
def test_bad_options(tsv, options, message):
    """An impossible option is named before anything is trained."""
    with pytest.raises(ValueError) as error:
        dna.main(command(tsv, *options))
    assert re.search(message, " ".join(str(error.value).split()))
    assert not (tsv.parents[1] / "out").exists()


def test_files_to_train_on_are_not_taken_for_files_to_test_on(tsv, monkeypatch):
    """The same files divided in another way are other data."""
    monkeypatch.setattr(dna, "make_run", lambda run, *args: pytest.fail(run.digest))
    second = write_table(tsv.with_name("second.tsv"), seed=1)
    third = write_table(tsv.with_name("third.tsv"), seed=2)
    digests = []
    for train, test in (([tsv, second], [third]), ([tsv], [second, third])):
        with pytest.raises(pytest.fail.Exception) as called:
            dna.main(["--train", *map(str, train), "--test", *map(str, test), *command(tsv, "--models", "lmm")[1:]])
        digests.append(str(called.value))
    assert digests[0] != digests[1]


def test_data_of_one_class_or_name_are_refused(tsv):
    """One class, a label in the test files alone, two files of one name: each is named."""
    (tsv.parent / "one.tsv").write_text("seq\tlabel\n" + "".join(f"{'ACGT' * i}\tx\n" for i in range(1, 30)))
    with pytest.raises(ValueError, match=r"one\.tsv has one class only: x"):
        dna.main(command(tsv.parent / "one.tsv"))
    with pytest.raises(ValueError, match="--test has the label x, --train only negative, positive"):
        dna.main(["--train", str(tsv), "--test", str(tsv.parent / "one.tsv"), *command(tsv)[1:]])
    with pytest.raises(ValueError, match="two DATA files have the same name"):
        dna.main([str(tsv), *command(tsv)])

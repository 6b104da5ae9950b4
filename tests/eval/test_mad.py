"""eval.mad: the six tasks are what their description says, and runs are recorded, kept and scored."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from covering import in_one_test
from torch import nn
from transformers import EvalPrediction
from transformers.modeling_outputs import BaseModelOutput

from eval.common.harness import IGNORED, accuracy
from eval.common.records import FILE, append_record, read_records
from eval.mad import run as mad
from eval.mad import training as mad_run
from eval.mad.models import BASELINES, NAMES, AutoEncoder, build, config_of
from eval.mad.tasks import TASKS, Sequences, Settings, draw_motifs, motifs, repeats
from eval.mad.training import Run, labelled_loss, make_data, settings_of, train

SMALL = ["--task_set", "length=16", "train_sequences=40", "--batch_size", "20", "--epochs", "2"]


@pytest.fixture
def few_held_out(monkeypatch):
    monkeypatch.setattr(mad_run, "HELD_OUT", 40)


def draw(task: str, number: int = 200, scored: bool = True) -> Sequences:
    return TASKS[task].make(np.random.default_rng(0), TASKS[task].settings, number, scored)


def whole_rows(data: Sequences) -> list[list[int]]:
    """The sequences with the next token of the last one, in training where all are labels."""
    return [[*ids, labels[-1]] for ids, labels in zip(data.input_ids.tolist(), data.labels.tolist(), strict=True)]


def expected_labels(pairs: Iterator[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[int]:
    """Labels of a sequence of (key, value), token by token: the values of keys seen before, which must be the same."""
    seen, labels = {}, []
    for key, value in pairs:
        labels += [IGNORED] * len(key) + (list(value) if key in seen else [IGNORED] * len(value))
        assert seen.setdefault(key, value) == value
    return labels


def split_pairs(tokens: list[int], first_value: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs of adjacent keys, below `first_value`, and values."""
    key, value = (), ()
    for token in tokens:
        if token < first_value and value:
            yield key, value
            key, value = (), ()
        if token < first_value:
            key += (token,)
        else:
            value += (token,)
    yield key, value


@pytest.mark.parametrize("task", ["recall", "noisy-recall"])
def test_recall_asks_the_values_of_repeated_keys(task):
    """A pair-by-pair reading gives the labels."""
    data, maps = draw(task), set()
    for ids, labels in zip(data.input_ids.tolist(), data.labels.tolist(), strict=True):
        noise = [i for i, token in enumerate(ids) if token >= 16]
        tokens = [token for token in ids if token < 16]
        if tokens[-1] < 8:  # the pair is cut off
            tokens.append(labels[-1] if labels[-1] != IGNORED else 8)
        pairs = list(split_pairs(tokens, 8))
        assert all(len(key) == len(value) == 1 for key, value in pairs)
        expected = expected_labels(pairs)[: len(ids) - len(noise)]
        found = [label for i, label in enumerate([IGNORED, *labels[:-1]]) if i not in noise]
        assert found == expected
        assert all(labels[i - 1] == IGNORED for i in noise if i)
        maps.add(tuple(sorted(set(pairs))))
    assert len(maps) > 150


def test_noise_has_its_share_and_its_own_tokens():
    """A fifth of the tokens are noise, of ids 16 to 31, at other places in every row."""
    ids = draw("noisy-recall").input_ids
    assert abs(np.mean(ids >= 16) - 0.2) < 0.01 and set(ids[ids >= 16]) == set(range(16, 32))
    assert len({row.tobytes() for row in ids >= 16}) == len(ids)
    assert draw("recall").input_ids.max() == 15


@pytest.mark.parametrize("task", ["recall", "noisy-recall", "fuzzy-recall"])
def test_recall_is_trained_on_all_next_tokens(task):
    """In training every next token is a label, but for padding."""
    data = draw(task, scored=False)
    labelled = data.labels != IGNORED
    assert np.array_equal(data.labels[:, :-1][labelled[:, :-1]], data.input_ids[:, 1:][labelled[:, :-1]])
    assert np.array_equal(data.labels[~labelled], np.full((~labelled).sum(), IGNORED))
    assert labelled.all() if task != "fuzzy-recall" else set(data.input_ids[:, 1:][~labelled[:, :-1]]) == {15}


def test_repeats_by_hand():
    """All but the first of equal keys are marked."""
    assert repeats(np.array([[3, 1, 3, 3, 1, 0]])).tolist() == [[False, False, True, True, True, False]]


def test_motifs_by_hand():
    """Motifs are the orders of different tokens, and all sizes are drawn equally often."""
    table = motifs(np.arange(5, 8), 2)
    assert table.tolist() == [[5, -1], [6, -1], [7, -1], [5, 6], [5, 7], [6, 5], [6, 7], [7, 5], [7, 6]]
    drawn = draw_motifs(np.random.default_rng(0), table, (100, 100), 1)
    assert set(drawn.ravel()) == set(range(9)) and abs(np.mean(drawn < 3) - 0.5) < 0.02
    assert set(draw_motifs(np.random.default_rng(0), table, (100, 100), 2).ravel()) == set(range(3, 9))


@pytest.mark.parametrize("scored", [True, False])
def test_fuzzy_recall_asks_whole_values_of_repeated_keys(scored):
    """Keys and values have 1 to 3 different tokens, keys 3 when scored; the last pair is asked; the labels are a
    reading's.
    """
    data, sizes = draw("fuzzy-recall", scored=scored), set()
    for ids, labels in zip(data.input_ids.tolist(), data.labels.tolist(), strict=True):
        row = [*ids, labels[-1]]
        start = next(i for i, token in enumerate(row) if token != 15)
        assert 0 <= start <= 9 and 15 not in row[start:]
        pairs = list(split_pairs(row[start:], 7))
        assert all(len(set(part)) == len(part) for pair in pairs for part in pair)
        sizes |= {(len(key), len(value)) for key, value in pairs}
        expected = expected_labels(pairs)
        assert expected[-1] != IGNORED
        if scored:
            assert labels[max(start - 1, 0) :] == expected[start == 0 :]
            assert set(labels[: max(start - 1, 0)]) <= {IGNORED}
    assert sizes == {(key, value) for key in ((3,) if scored else (1, 2, 3)) for value in (1, 2, 3)}


def test_selective_copying_asks_the_tokens_in_their_order():
    """After the marker the labels are what was not blank, in order."""
    data = draw("selective-copying")
    for ids, labels in zip(data.input_ids.tolist(), data.labels.tolist(), strict=True):
        assert ids[239] == 15 and ids.count(15) == 1 and set(ids[240:]) == {14}
        assert labels == [IGNORED] * 240 + [token for token in ids[:239] if token != 14] and len(ids) == 256
    assert len({row.tobytes() for row in data.input_ids != 14}) == len(data.input_ids)


def test_compression_asks_all_tokens_but_the_last():
    """The labels are the inputs."""
    ids, labels = draw("compression")
    assert np.array_equal(ids[:, :-1], labels[:, :-1]) and ids[:, :-1].max() == 14
    assert set(ids[:, -1]) == {15} and set(labels[:, -1]) == {IGNORED}


def test_memorization_has_one_map_for_all_sequences():
    """A key has the same value in training and test and for every seed, and no other key has it."""
    values = {}
    for seed in (0, 1):
        run = make_run(data="memorization", seed=seed)
        training, held_out = make_data(run, settings_of(run))
        for ids, labels in (training, *held_out.values()):
            assert set(ids[:, 1::2].ravel()) == {255} and set(labels[:, ::2].ravel()) == {IGNORED}
            for key, value in zip(ids[:, ::2].ravel(), labels[:, 1::2].ravel(), strict=True):
                assert values.setdefault(key, value) == value and key < 127 <= value < 254
    assert len(values) == len(set(values.values())) == 127


def make_run(**changed) -> Run:
    run = {"data": "recall", "row": "llama", "model": "llama", "settings": {}, "learning_rate": 1e-3, "seed": 0}
    run |= {"epochs": 2, "evaluate_every": 1, "weight_decay": 0.0, "batch_size": 20, "bf16": False}
    return Run(**run | {"task_settings": {}} | changed)


def test_splits_differ_and_are_the_same_for_all_models():
    """No test sequence is trained on, and models differ in nothing but themselves."""
    run, other = make_run(), make_run(model="lmm", learning_rate=5e-4, epochs=4)
    (training, held_out), (again, _) = make_data(run, settings_of(run)), make_data(other, settings_of(other))
    assert np.array_equal(training.input_ids, again.input_ids) and len(training.labels) == 12_800
    rows = [{row.tobytes() for row in x.input_ids} for x in (training, *held_out.values())]
    assert [len(x) for x in rows] == [12_800, 1_280, 1_280] and not set.intersection(*rows)
    assert not rows[0] & rows[2] and not rows[1] & rows[2]
    another_seed, _ = make_data(make_run(seed=1), settings_of(run))
    assert not np.array_equal(training.input_ids, another_seed.input_ids)


def test_loss_and_accuracy_by_hand():
    """Only positions with a label count, each as much as another, and none is shifted."""
    labels = torch.tensor([[1, IGNORED, 0], [IGNORED, IGNORED, 1]])
    logits = torch.zeros(2, 3, 2)
    logits[0, 0, 1] = logits[0, 1, 0] = logits[1, 2, 0] = np.log(3)
    expected = -np.mean(np.log([3 / 4, 1 / 2, 1 / 4]))
    assert abs(labelled_loss({"logits": logits}, labels).item() - expected) < 1e-6
    predicted = EvalPrediction(logits.argmax(-1).numpy(), labels.numpy())
    assert abs(accuracy(predicted)["accuracy"] - 2 / 3) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_models_are_causal_and_of_the_same_width(name):
    """Every model has two blocks of width 128 (Mamba2 four of its own), and none sees what is to be predicted."""
    config = config_of(name, 16, {})
    assert config.hidden_size == 128 and config.num_hidden_layers == (4 if name.startswith("mamba2") else 2)
    torch.manual_seed(0)
    model = build(name, config, Settings(), auto_encoder=False).eval()
    assert 400_000 < model.num_parameters() < 850_000
    ids = torch.randint(16, (1, 20))
    other = ids.clone()
    other[0, 10] = (other[0, 10] + 1) % 16
    first, second = (model(input_ids=x).logits for x in (ids, other))
    torch.testing.assert_close(first[:, :10], second[:, :10])
    assert not torch.allclose(first[:, 10:], second[:, 10:])


@pytest.mark.parametrize("name", BASELINES)
def test_a_late_baseline_starts_with_a_tenth_of_the_output(name):
    """But for the output projections, and Gated DeltaNet's filters and forgetting, the weights are the same."""
    states = []
    for which in (name, f"{name}-late"):
        torch.manual_seed(0)
        states.append(build(which, config_of(which, 16, {}), Settings(), auto_encoder=False).state_dict())
    changed = {key for key, weight in states[0].items() if not torch.equal(weight, states[1][key])}
    outputs = {key for key in changed if key.endswith(("o_proj.weight", "out_proj.weight"))}
    assert len(outputs) == (4 if name == "mamba2" else 2)
    for key in outputs:
        torch.testing.assert_close(states[1][key], states[0][key] / 10)
    others = {key.rpartition("linear_attn.")[2] for key in changed - outputs}
    assert others == ({"conv1d.weight", "A_log", "dt_bias"} if name == "gated-deltanet" else set())


class FixedOutputs(nn.Module):
    """An encoder with given outputs (B, T, d)."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, input_ids):
        return BaseModelOutput(last_hidden_state=self.outputs)


def test_the_auto_encoder_decodes_the_last_output_alone():
    """Only the last token's output reaches the decoder."""
    torch.manual_seed(0)
    ids, outputs = torch.randint(16, (2, 32)), torch.randn(2, 32, 128)
    model = AutoEncoder(config_of("llama", 16, {}), 32)
    logits = []
    for changed in (None, slice(0, -1), slice(-1, None)):
        x = outputs.clone()
        if changed is not None:
            x[:, changed] += 1
        model.encoder = FixedOutputs(x)
        logits.append(model(ids).logits)
    assert logits[0].shape == (2, 32, 16) and not torch.allclose(logits[0][:, 0], logits[0][:, 1])
    assert torch.equal(logits[0], logits[1]) and not torch.allclose(logits[0], logits[2])


@pytest.mark.parametrize("task", ["recall", "compression"])
def test_a_run_is_recorded(tmp_path, task, few_held_out, capsys):
    """A run records all it depends on and its curve."""
    run = make_run(data=task, row="lmm off", model="lmm", settings={"memory_max_lr": 0}, epochs=4, evaluate_every=2)
    run = Run(**vars(run) | {"task_settings": {"length": 16, "train_sequences": 40}})
    assert train(run, tmp_path / "new")["commit"] is not None
    (record,) = read_records(tmp_path / "new", "mad")
    assert Run(**record["run"]) == run and record["config"]["memory_max_lr"] == 0
    assert record["name"] == run.name and record["config"]["vocab_size"] == 16
    assert [row[0] for row in record["curve"]] == [2, 4] and np.isfinite(record["curve"]).all()
    assert all(0 <= share <= 1 for row in record["curve"] for share in row[1:3])
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE]
    assert f"{task}-lmm-off-lr0.001-seed0: epoch 4/4" in capsys.readouterr().out


def test_a_finished_run_is_kept_and_another_is_not_taken_for_it(tmp_path, few_held_out, capsys, monkeypatch):
    """A finished run is not made again. A file of other settings, or of other defaults of the model, is an error."""
    argv = ["--models", "llama", "--tasks", "recall", "--learning_rates", "1e-3", "--output", str(tmp_path), *SMALL]
    run = mad.make_runs(mad.parse_args(argv))[0]
    train(run, tmp_path)
    monkeypatch.setattr(mad_run, "build", lambda *args: pytest.fail("a finished run is made again"))
    mad.main(argv)
    assert "| llama |" in (tmp_path / "table.md").read_text()
    assert "1 runs, 1 of them finished" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"epochs=2, not 4"):
        mad.main([*argv, "--epochs", "4"])
    (record,) = read_records(tmp_path, "mad")
    record["config"]["hidden_act"] = "relu"
    (tmp_path / FILE).unlink()
    append_record(record, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"a model with hidden_act=relu, which is silu by default now: give another"):
        mad.main(argv)


@in_one_test(
    "options,message",
    [
        (["--epochs", "3", "--evaluate_every", "2"], "--epochs 3 must be a multiple of --evaluate_every 2"),
        (["--learning_rates", "-1"], "--learning_rates must be at least 0, but is -1.0"),
        *([] if torch.cuda.is_available() else [(["--graph"], "--graph needs a CUDA device")]),
        (["--set", "memory_max_lr=0"], "--label '': --set needs a name of its own"),
        (["--models", "llama", "--set", "memory_depth=1", "--label", "x"], "llama has no such field"),
        (["--models", "lmm", "--set", "memory_head_dim=64", "--label", "x"], "lmm has no such field"),
        (["--models", "lmm", "--set", "memory_depth=0", "--label", "x"], "memory_depth"),
        (
            ["--tasks", "selective-copying", "--task_set", "length=32"],
            "length must be above twice to_copy .16., but is 32",
        ),
        (
            ["--tasks", "fuzzy-recall", "--task_set", "length=11"],
            "length must be at least four times motif .3., but is 11",
        ),
        (["--task_set", "length=0"], "--task_set: recall has no sequences of .*length=0"),
        (["--tasks", "selective-copying", "--task_set", "to_copy=0"], "no token has a label"),
        (["--task_set", "length=x"], "--task_set: recall has no sequences of .*length=x"),
        (["--task_set", "noise=2.0"], "--task_set: recall has no sequences of .*noise=2.0"),
        (
            ["--task_set", "vocab_size=2", "noise_vocab_size=9"],
            "--task_set: recall has no sequences of .*noise_vocab_size=9",
        ),
        (["--task_set", "lenght=3"], "--task_set: recall .* unexpected keyword argument 'lenght'"),
    ],
)
def test_bad_input_is_refused_before_any_run(tmp_path, options, message):
    """A wrong option is named before any work."""
    with pytest.raises(ValueError, match=message):
        mad.main(["--output", str(tmp_path), *options])
    assert not list(tmp_path.iterdir())

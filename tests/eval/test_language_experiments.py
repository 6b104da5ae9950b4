"""eval/language: runs are scored by position and compared text by text."""

import re

import numpy as np
import pytest
import torch

from eval.common import compared_models as models
from eval.common.records import append_record, read_records
from eval.common.token_attention import attend
from eval.language import ablation, caches, compare_runs, token_blocks, train_and_score

PARAMETERS = 700_000


@pytest.fixture
def texts(tmp_path):
    """Two folders of short texts."""
    for folder in ("train", "score"):
        (tmp_path / folder).mkdir()
        for i in range(2):
            (tmp_path / folder / f"{i}.txt").write_text(f"The ship {folder} number {i} sailed on. " * 60)
    return tmp_path


def run(texts, name, model="lmm", *options):
    output = texts / "results" / "runs.jsonl"
    folders = [
        "--train_text",
        str(texts / "train"),
        "--score_text",
        str(texts / "score"),
        "--output",
        str(output),
        "--label",
        name,
    ]
    sizes = ["--vocab_size", "300", "--block_length", "32", "--score_length", "96", "--batch_size", "2", "--steps", "2"]
    small = ["--parameters", str(PARAMETERS), "--stretches", "2", "--cache", str(texts / "cache")]
    train_and_score.main([model, *folders, *sizes, *small, *options])
    return output


def test_a_run_and_its_twin_are_compared(texts, capsys):
    """A run records its settings, curve and losses per stretch, and the table has both runs with their difference."""
    run(texts, "lmm")
    output = run(texts, "off", "lmm", "--set", "memory_max_lr=0")
    record = read_records(output, "language")[1]
    assert record["settings"] == {"memory_max_lr": 0} and record["config"]["memory_max_lr"] == 0
    assert record["edges"] == [0, 64, 96] and [len(x) for x in record["stretches"]] == [3] * 4
    assert np.allclose(np.mean([x[1:] for x in record["stretches"]], axis=0), record["mean"], atol=1e-4)
    picture = texts / "losses.png"
    compare_runs.main([str(output), "--pairs", "lmm:off", "--plot", str(picture)])
    printed = capsys.readouterr().out
    assert "| lmm |" in printed and "| lmm less off | 1 |" in printed and picture.stat().st_size > 10_000
    compare_runs.main([str(output), "--rows", "lmm", "off*", "--baseline", "off"])
    assert printed.endswith(capsys.readouterr().out)  # of two rows, the same
    text, losses = record["stretches"][0][0], [x[1:] for x in record["stretches"]]
    mine = [x for x, stretch in zip(losses, record["stretches"], strict=True) if stretch[0] == text]
    compare_runs.main([str(output), "--rows", "off", "--texts", text])
    assert " | ".join(f"{x:.3f}" for x in np.mean(mine, axis=0)) in capsys.readouterr().out and len(mine) < len(losses)
    with pytest.raises(ValueError, match="--texts: lmm was not scored on another"):
        compare_runs.main([str(output), "--texts", text, "another"])
    with pytest.raises(ValueError, match=r"--rows mag: no run in .* has such a name"):
        compare_runs.main([str(output), "--rows", "mag"])


def test_caches_read_the_model_that_was_trained(texts):
    """A saved model with convolutions and a token memory gives what its run has recorded; its row with counts too."""
    runs = run(texts, "changed", "mistral-conv-token", "--save_model", str(texts / "model"))
    folders = {"train_text": "train", "choice_text": "score", "score_text": "score", "cache": "cache"}
    options = {f"--{name}": texts / folder for name, folder in folders.items()}
    options |= {"--runs": runs, "--output": texts / "caches.jsonl", "--label": "changed"}
    options |= {"--score_length": 96, "--stretches": 2}
    caches.main([str(texts / "model"), *(str(x) for option in options.items() for x in option)])
    rows = {x["name"]: x["mean"] for x in read_records(texts / "caches.jsonl", "language")}
    np.testing.assert_allclose(rows["changed"], read_records(runs, "language")[0]["mean"], atol=2e-4)
    assert np.less(rows["changed+counts"], rows["changed"]).all()


def test_a_pair_that_is_none_is_refused(texts):
    """A pair that is not NAME:BASELINE of the rows is named in an error."""
    file = str(run(texts, "lmm"))
    for pair in ("lmm", "lmm:other", "lmm:lmm:lmm"):
        with pytest.raises(ValueError, match=f"--pairs must be NAME:BASELINE, all of lmm, but has {pair}"):
            compare_runs.main([file, "--pairs", pair])


def test_a_finished_run_is_kept(texts):
    """A run that the output has, by label and seed, is refused before any work."""
    output = run(texts, "lmm")
    before = output.read_bytes()
    with pytest.raises(ValueError, match="has lmm with seed 0: give another --label"):
        run(texts, "lmm")
    assert output.read_bytes() == before


@pytest.mark.parametrize("name", models.NAMES)
def test_models_are_of_equal_size(name):
    """Every model has the parameters asked for, within 5 %."""
    config = models.fit_config(name, 1_200_000, {"vocab_size": 2048})
    assert abs(models.count_parameters(name, config) / 1_200_000 - 1) < 0.05


@pytest.mark.parametrize("name", ["mag", "llama", "mamba2"])
def test_a_model_too_small_for_mlps_is_an_error(name):
    """The error says which size is possible, and that size is."""
    with pytest.raises(ValueError, match=f"the parameters of {name} must be at least .*, but are 300000") as error:
        models.fit_config(name, 300_000, {"vocab_size": 2048})
    smallest = int(re.search(r"least (\d+)", str(error.value))[1])
    config = models.fit_config(name, smallest, {"vocab_size": 2048})
    assert models.count_parameters(name, config) == smallest


CHANGED = ["llama-conv", *models.POINTERS, *(f"{name}-token" for name in models.BASELINES)]


@pytest.mark.parametrize("name", CHANGED)
def test_changed_models_are_causal(name):
    """A changed token changes no logit before it."""
    torch.manual_seed(0)
    model = models.build_model(name, models.fit_config(name, PARAMETERS, {"vocab_size": 300})).eval()
    ids = torch.randint(0, 300, (1, 20))
    other = ids.clone()
    other[0, 10] = (other[0, 10] + 1) % 300
    first, second = (model(input_ids=x, use_cache=False).logits for x in (ids, other))
    assert torch.equal(first[:, :10], second[:, :10]) and not torch.equal(first[:, 10:], second[:, 10:])


def test_a_token_memory_behind_any_model_is_that_of_titans():
    """With the same weights, MAG with a token memory of its own and MAG with one behind it give the same logits and
    gradients; a cache is refused.
    """
    settings = {"vocab_size": 300, "intermediate_size": 64, "memory_chunk_size": 64}
    own = models.build_model("mag", models.fit_config("mag", 0, settings | {"token_memory_features": 512}))
    behind = models.build_model("mag-token", models.fit_config("mag-token", 0, settings))
    weights = {
        name.replace("model.token_memory", "model.memory_behind_last_layer.layer"): x
        for name, x in own.state_dict().items()
    }
    behind.load_state_dict(weights)
    ids = torch.randint(0, 300, (2, 130))
    first, second = (model(input_ids=ids, labels=ids, use_cache=False) for model in (own, behind))
    torch.testing.assert_close(second.logits, first.logits)
    for output in (first, second):
        output.loss.backward()
    theirs = dict(behind.named_parameters())
    for name, x in own.named_parameters():
        name = name.replace("model.token_memory", "model.memory_behind_last_layer.layer")
        torch.testing.assert_close(theirs[name].grad, x.grad)
    with pytest.raises(ValueError, match="use_cache must be False"):
        behind(input_ids=ids)


@pytest.mark.parametrize("window", [None, 1, 4, 50])
def test_attention_over_tokens_is_softmax_attention(window):
    """Blocks of a window give what a mask of all pairs gives."""
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 23, 8, dtype=torch.float64)
    offset = torch.arange(23)[:, None] - torch.arange(23)
    seen = (offset >= 0) & (offset < (window or 23))
    expected = (queries @ keys.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(attend(queries, keys, values, window), expected)


def test_difference_and_share_by_hand(tmp_path):
    """A difference, and the share of a gap, is of means over texts, not stretches."""
    for name, losses in (("a", [[1.0], [1.0], [4.0]]), ("b", [[0.5], [0.5], [3.0]]), ("full", [[0.0], [0.0], [0.0]])):
        stretches = [[text, *loss] for text, loss in zip(("x", "x", "y"), losses, strict=True)]
        for seed in (0, 1):
            record = {"parameters": 1, "edges": [0, 64], "stretches": stretches}
            record |= {"benchmark": "language", "name": name, "training": {"seed": seed, "block_length": 64}}
            append_record(record, tmp_path / "runs.jsonl")
    rows = compare_runs.read_rows([tmp_path], ["*"])
    assert compare_runs.paired_difference(rows["b"], rows["a"]) == ["2", "-0.750 [-1.000, -0.500]"]  # x -0.5, y -1
    share = compare_runs.share_of_gap(rows["b"], rows["a"], rows["full"])
    assert share == ["2", "0.30 [0.25, 0.50]"]  # 0.5 of 1 in x and 1 of 4 in y; the mean of the shares would be 0.375


def test_intervals_are_over_seeds_and_texts(tmp_path):
    """An interval covers what the seeds do, although all texts agree; the difference of a single seed has none."""
    for seed, gain in ((0, 0.1), (1, 0.3)):
        for name, loss in (("a", 1.0), ("b", 1.0 - gain)):
            record = {"parameters": 1, "edges": [0, 64], "stretches": [["x", loss], ["y", loss]]}
            record |= {"benchmark": "language", "name": name, "training": {"seed": seed, "block_length": 64}}
            append_record(record, tmp_path / "runs.jsonl")
    rows = compare_runs.read_rows([tmp_path], ["*"])
    assert compare_runs.paired_difference(rows["b"], rows["a"]) == ["2", "-0.200 [-0.300, -0.100]"]
    single = {name: row._replace(losses={0: row.losses[0]}) for name, row in rows.items()}
    assert compare_runs.paired_difference(single["b"], single["a"]) == ["1", "-0.100"]


def test_stretches_are_spread_over_a_text():
    """The first and the last stretch reach the ends of the text."""
    stretches = token_blocks.cut_stretches([np.arange(100)], length=9, number=3)
    assert stretches[:, 0].tolist() == [0, 45, 90] and stretches[-1, -1] == 99


def test_an_ablation_takes_out_one_part_at_a_time(tmp_path, monkeypatch):
    """Each row differs from the variant in the field of its part, and in fields that follow; a finished row is kept."""
    calls = []
    monkeypatch.setattr(train_and_score, "main", calls.append)
    output = tmp_path / "runs.jsonl"
    append_record({"benchmark": "language", "name": "mag-off", "training": {"seed": 1}}, output)
    ablation.main(["mag", "--seeds", "0", "1", "--output", str(output), "--steps", "2", "--set", "num_hidden_layers=2"])
    assert len(calls) == 2 * len(ablation.PARTS) - 1
    found = {}
    for call in calls[: len(ablation.PARTS)]:
        args = train_and_score.parse_args([*call, "--train_text", "train", "--score_text", "score"])
        assert (args.model, args.seed, args.steps) == ("mag", 0, 2)
        settings = {"vocab_size": 300} | models.parse_settings(args.set)
        found[args.label] = models.fit_config("mag", PARAMETERS, settings).to_dict()
    whole = found.pop("mag")
    assert whole["num_hidden_layers"] == 2
    for label, config in found.items():
        field = ablation.PARTS[label.removeprefix("mag")].split("=")[0]
        assert {name for name in config if config[name] != whole[name]} <= {field, "intermediate_size"}, label
        assert config[field] != whole[field]
    assert not any("persistent" in row for row in ablation.rows("lmm"))

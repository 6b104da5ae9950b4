"""titans-hf eval on tiny models: lm-eval's own scores, saved results and their reuse, tables, and bad input."""

import json

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import MistralConfig, MistralForCausalLM

from titans_hf import TitansConfig, TitansForCausalLM
from titans_hf.cli.training.tokenizer import byte_tokenizer

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")
from eval_common import EVAL, make_data
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from titans_hf.cli import eval as run
from titans_hf.cli.evaluation import checkpoints, result_tables, suites

SIZES = dict(
    vocab_size=259,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    sliding_window=16,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
    initializer_range=0.3,
)
FAST = ["wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "boolq"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of checkpoints with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**SIZES, max_position_embeddings=4096)).save_pretrained(folder / "mistral")
    TitansForCausalLM(TitansConfig(**SIZES, memory_chunk_size=8)).save_pretrained(folder / "titans")
    for name in ("mistral", "titans"):
        byte_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def evaluate(data, models, tmp_path):
    """A function that runs the command line and returns results.json as {(model, task, length): result}."""

    def call(*names, suite=("piqa",), output=tmp_path / "out", **options):
        flags = [text for key, value in options.items() for text in (f"--{key}", *str(value).split())]
        paths = [str(models / name) for name in names]
        run.main([*paths, "--suite", *suite, "--data", str(data), "--output", str(output), "--device", "cpu", *flags])
        found = json.loads((output / "results.json").read_text())
        return {(result["model"], result["task"], result["length"]): result for result in found}

    return call


def test_scores_are_those_of_lm_eval_hf(evaluate, data, models):
    """All scores equal those of lm-eval's "hf" model."""
    found = evaluate("mistral", suite=[*FAST, "niah_single_2"], lengths=1024, limit=2, batch_size=2)
    metadata = {"data": str(data), "tokenizer": str(models / "mistral"), "max_seq_lengths": [1024], "samples": 2}
    manager = TaskManager(include_path=str(EVAL / "tasks"), include_defaults=False, metadata=metadata)
    assert len(found) == 9
    for (_, task, _), result in found.items():
        name = suites.TASKS[task].local
        # Tasks one by one: lm-eval puts the requests of several into the same batches, which changes the rounding.
        theirs = simple_evaluate(
            "hf",
            {"pretrained": str(models / "mistral"), "dtype": "auto"},
            tasks=[name],
            batch_size=2,
            device="cpu",
            limit=2,
            bootstrap_iters=0,
            task_manager=manager,
        )
        values = {metric: value for metric, value in result["metrics"].items() if "stderr" not in metric}
        assert values == {metric: theirs["results"][name][f"{metric},none"] for metric in values}
        assert result["documents"] == theirs["n-samples"][name]["effective"]


@pytest.mark.slow
def test_the_batch_size_changes_no_score(evaluate, tmp_path):
    """Scores are independent of the batch size."""
    suite = [*FAST, "wikitext_whole", "babilong_qa1"]
    one, many = (evaluate("mistral", suite=suite, lengths=1024, output=tmp_path / str(n), batch_size=n) for n in (1, 8))
    for key in one:
        for name, value in one[key]["metrics"].items():
            if isinstance(value, float) and "stderr" not in name:
                assert value == pytest.approx(many[key]["metrics"][name], rel=1e-6)
            if name.startswith("acc") and "stderr" not in name:
                assert value == many[key]["metrics"][name]


def test_what_is_finished_is_not_run_again(evaluate, capsys, monkeypatch):
    """Saved results are used again without loading the model."""
    first = evaluate("mistral", suite=["piqa", "boolq"])
    monkeypatch.setattr(run, "load_lm", lambda *args: pytest.fail("nothing was left to run"))
    assert evaluate("mistral", suite=["piqa", "boolq"]) == first
    assert "mistral: 2 of 2 tasks are done already and skipped" in capsys.readouterr().out


def test_results_go_into_the_card(evaluate, models):
    """Results are added to the model card, whose other content stays."""
    path = models / "titans" / "README.md"
    trained = EvalResult("text-generation", "books", "books", "loss", 1.5)
    data = ModelCardData(license="mit", model_name="mine", eval_results=[trained])
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n# Mine\n\n## Training\n\nLong.\n").save(path)
    found = evaluate("titans", suite=["piqa", "babilong_qa1"], lengths=0, update_cards="")
    for _ in range(2):  # the second time in the place of the first
        card = ModelCard.load(path)
        assert (card.data.license, card.data.model_name) == ("mit", "mine")
        shown = {(r.dataset_type, r.metric_name): (r.metric_value, r.dataset_config) for r in card.data.eval_results}
        assert len(card.data.eval_results) == 3 and shown["books", None] == (1.5, None)
        accuracy = found["titans", "piqa", None]["metrics"]["acc"]
        assert shown["piqa", "acc"] == (100 * accuracy, None)
        assert shown["babilong_qa1", "acc"][1] == "at 0 tokens"
        assert "Long." in card.text and card.text.count("## Benchmarks") == 1
        assert f"| piqa |  | 2 | acc | {100 * accuracy:.2f} ±" in card.text
        evaluate("titans", suite=["piqa"], update_cards="")


def test_other_settings_are_run_anew(evaluate, models, data, capsys):
    """Another limit, data or weights cause a new evaluation."""

    def dates(**options):
        return {key: result["date"] + str(result["seconds"]) for key, result in evaluate("mistral", **options).items()}

    before = dates()
    assert dates() == before
    assert evaluate("mistral", limit=1)["mistral", "piqa", None]["documents"] == 1
    assert "limit was None, is 1" in capsys.readouterr().out
    assert evaluate("mistral")["mistral", "piqa", None]["documents"] == 2
    labels = data / "commonsense/piqa/valid-labels.lst"
    kept = labels.read_text()
    labels.write_text("0\n0\n")
    checkpoints.digest.cache_clear()
    evaluate("mistral")
    labels.write_text(kept)
    checkpoints.digest.cache_clear()
    assert "piqa_local is evaluated anew: data was" in capsys.readouterr().out
    model = MistralForCausalLM.from_pretrained(models / "mistral")
    saved = (models / "mistral/model.safetensors").read_bytes()
    model.lm_head.weight.data.neg_()
    model.save_pretrained(models / "mistral")
    checkpoints.digest.cache_clear()
    evaluate("mistral")
    (models / "mistral/model.safetensors").write_bytes(saved)
    checkpoints.digest.cache_clear()
    assert "piqa_local is evaluated anew" in capsys.readouterr().out


def test_an_interruption_loses_only_the_task_in_progress(evaluate, monkeypatch, capsys, tmp_path):
    """After an interruption finished tasks are saved and the rest runs."""
    whole = evaluate("mistral", suite=["piqa", "boolq"], output=tmp_path / "whole")
    done = []

    def stop_at_the_second(lm, unit, *args):
        if done:
            raise KeyboardInterrupt
        done.append(unit)
        return original(lm, unit, *args)

    original = run.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(run, "evaluate", stop_at_the_second)
        with pytest.raises(SystemExit, match="interrupted: finished results are saved"):
            evaluate("mistral", suite=["piqa", "boolq"])
    assert [path.name for path in (tmp_path / "out/mistral").iterdir()] == ["piqa_local.json"]
    assert "| **mistral** (" in (tmp_path / "out/table.md").read_text()
    capsys.readouterr()
    resumed = evaluate("mistral", suite=["piqa", "boolq"])
    assert "1 of 2 tasks are done already" in capsys.readouterr().out
    assert {key: r["metrics"] for key, r in resumed.items()} == {key: r["metrics"] for key, r in whole.items()}


@pytest.mark.slow
def test_several_models_share_the_tables_and_plots(evaluate, tmp_path):
    """Tables and plots list all models, the paper's figures and what was left out."""
    suite = ["piqa", "boolq", "social_iqa", "niah_single_1", "babilong_qa1"]
    evaluate("mistral", "titans", suite=suite, lengths="1024", limit=1)
    table = (tmp_path / "out/table.md").read_text()
    for name in ("mistral", "titans"):
        assert sum(line.startswith(f"| **{name}**") for line in table.splitlines()) == 3
    assert "| paper: Titans (MAG), 340M, 15B tokens | 25.07 | – | 28.72 | 36.71 | 64.88 | 40.56 |" in table
    assert "Avg. of 2 acc" in table
    assert "| paper: Titans (MAC) | – |\n" in table  # at 1K; the other needles were not asked for
    assert "| model | S-NIAH-PK 1K |\n" in table
    assert "**Only the first 1 documents of every task**" in table
    assert "Left out: social_iqa: only the Hub has it" in table
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"niah.png", "babilong.png"}


def test_results_of_another_limit_stay_out_of_the_tables(evaluate, capsys):
    """Results of another --limit are left out of the tables, with a message."""
    evaluate("mistral", suite=["piqa"], limit=1)
    assert evaluate("mistral", suite=["boolq"]).keys() == {("mistral", "boolq", None)}
    assert "1 saved results of other settings are left out" in capsys.readouterr().out
    assert len(evaluate("titans", suite=["piqa"], limit=1)) == 2


def test_cut_tokens_are_counted_and_told(evaluate, tmp_path):
    """Tokens cut off prompts are counted and reported in the table."""
    # 600 tokens of 1024, of which 128 are generated.
    suite = ["niah_single_1", "lambada_openai"]
    found = evaluate("mistral", suite=suite, lengths=1024, limit=2, max_length=600)
    needle = found["mistral", "niah_single_1", 1024]
    assert 2 * (1024 - 89 - 600) < needle["cut_tokens"] <= 2 * (1024 - 600)
    assert found["mistral", "lambada_openai", None]["cut_tokens"] == 0
    assert "**mistral cut tokens off prompts longer than its limit**" in (tmp_path / "out/table.md").read_text()


def test_plots_mark_the_trained_length(tmp_path, monkeypatch):
    """Points lie at their lengths, and a line at the length that all models were trained on, which is none if they
    differ.
    """
    for name, block_length in (("a", 1024), ("b", 1024), ("c", 4096)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"arguments": {"block_length": block_length}}))
    (tmp_path / "d").mkdir()
    lengths = [checkpoints.trained_length([str(tmp_path / name) for name in names]) for names in ("ab", "abc", "abd")]
    assert lengths == [1024, None, None]
    figures = []
    monkeypatch.setattr(result_tables, "save_figure", lambda figure, path: figures.append(figure))
    results = {"a": {("babilong_qa1", n): {"metrics": {"acc": 0.5}} for n in (0, 2048, 4096)}}
    result_tables.plot(results, {"qa1": ["babilong_qa1"]}, "Answers", 1024, tmp_path / "x.png")
    (axes,) = figures[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("sequence length (tokens)", "accuracy (%)")
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()}
    assert lines["longest in training"] == [1024, 1024]
    assert [0, 2048, 4096] in lines.values()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0K", "2K", "4K"]


def test_averages_and_errors():
    """Averages combine standard errors and are empty if a score is missing, and the paper's nearest size is chosen."""
    assert result_tables.mean([(1.0, 3.0), (2.0, 4.0)]) == (1.5, 2.5)
    assert result_tables.mean([(1.0, None), (2.0, 4.0)]) == (1.5, None)
    assert result_tables.mean([(1.0, 1.0), None]) is None
    nearest = [result_tables.nearest(size) for size in (10**6, 380 * 10**6, 10**9)]
    assert nearest == [
        "340000000",
        "400000000",
        "760000000",
    ]


def test_the_papers_averages_are_those_of_its_columns():
    """The paper's averages follow from its columns."""
    known = {"340000000": {"Titans (MAC)": 47.36, "Transformer++": 42.92}, "760000000": {"Titans (MAG)": 52.50}}
    for size, rows in known.items():
        for name, average in rows.items():
            figures = result_tables.PAPER["table_1"]["sizes"][size]["rows"][name]
            assert sum(figures[2:]) / 8 == pytest.approx(average, abs=0.006)


def test_bad_input_is_refused_before_any_work(data, models, tmp_path, monkeypatch):
    """Bad arguments raise an error that names them before a model is loaded."""
    monkeypatch.setattr(run, "load_lm", lambda *args: pytest.fail("loaded a model"))
    bare, incomplete = tmp_path / "bare", tmp_path / "incomplete"
    MistralForCausalLM.from_pretrained(models / "mistral").save_pretrained(bare)
    (incomplete / "lambada").mkdir(parents=True)

    def refused(match, *argv, model=models / "mistral", folder=data):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            run.main([str(model), "--data", str(folder), "--output", str(tmp_path / "out"), *argv])

    refused(r"--data .*nowhere: no such folder", "--suite", "lm", folder=tmp_path / "nowhere")
    refused(r"holds no wikitext/wiki.test.raw.*lambada_test", "--suite", "lm", folder=incomplete)
    refused(r"--suite piqua: no such suite or task. Suites: all lm .* Tasks: wikitext ", "--suite", "piqua")
    refused(r"bare has no tokenizer", "--suite", "lm", model=bare)
    refused(r"incomplete is not a checkpoint: it holds no config.json", "--suite", "lm", model=incomplete)
    refused(r"--lengths 200: .*too short for niah_single_1", "--suite", "niah", "--lengths", "200")
    refused(r"--max_length 128 leaves no room", "--suite", "niah", "--lengths", "2048", "--max_length", "128")
    refused(r"would write the results into MODEL", "--suite", "lm", "--output", str(models))
    refused(r"--lengths 20: .*too short for the facts", "--suite", "babilong", "--lengths", "20")
    refused(r"--lengths: no chosen task", "--suite", "lm", "--lengths", "2048")
    refused(r"--update_cards: .*mistral holds no README.md", "--suite", "lm", "--update_cards")
    refused(r"--update_cards: .* are a trial", "--suite", "lm", "--update_cards", "--limit", "2")
    refused(r"--dtype float7 must be auto or a dtype of PyTorch", "--suite", "lm", "--dtype", "float7")
    refused(r"--limit must be at least 1, but is 0", "--suite", "lm", "--limit", "0")
    assert not (tmp_path / "out").exists()


def test_two_models_of_one_name_are_refused(models, tmp_path):
    """Two models of one folder name raise an error."""
    (tmp_path / "mistral").symlink_to(models / "mistral")
    copy = tmp_path / "copies" / "mistral"
    copy.mkdir(parents=True)
    with pytest.raises(ValueError, match="two models are called mistral"):
        checkpoints.read_checkpoints([str(models / "mistral"), str(copy)])


def test_hub_names_and_lengths(monkeypatch):
    """Without --data the plan has lm-eval's own task names and lengths."""
    units, skipped = suites.plan(suites.choose(["all"]), None, None)
    assert not skipped
    names = {unit.lm_eval_name for unit in units}
    assert {"social_iqa", "piqa", "niah_single_3", "babilong_qa5", "wikitext_whole"} <= names
    (unit,) = (unit for unit in units if str(unit) == "babilong_qa1-4096")
    assert unit.metadata(None, "tokens", None) == {"tokenizer": "tokens", "max_seq_lengths": "4k"}

"""scripts/train.py: kinds of data, fine-tuning, overrides, and interrupted or finished runs."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_run import LLAMA, TITANS
from transformers import AutoModelForCausalLM

from titans_hf_scripts import train
from titans_hf_scripts.training import blocks as blocks_module
from titans_hf_scripts.training.arguments import DataArguments, ModelArguments
from titans_hf_scripts.training.checkpoints import what_is_missing
from titans_hf_scripts.training.data import load_blocks
from titans_hf_scripts.training.documents import load_splits
from titans_hf_scripts.training.model import load_config, split_overrides, unused_weights
from titans_hf_scripts.training.tokenizer import byte_tokenizer, is_byte_tokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")
SHORT = dict(max_steps=2, eval_steps=2, save_steps=2)


def decoded(path: Path, **changes) -> str:
    arguments = DataArguments(train_data=str(path), eval_data=str(path), block_length=1000, **changes)
    loaded = load_blocks(arguments, byte_tokenizer())
    return "".join(byte_tokenizer().decode(block["input_ids"]) for block in loaded.train)


def write_rows(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_rows_give_their_text_column(tmp_path, name, streaming):
    """Of a table only the text column is learnt: otherwise a model would learn braces and field names."""
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / name, [{"body": "ab", "id": 1}, {"body": "c", "id": 2}])
    (tmp_path / "folder" / "README.md").write_text("not data")
    for path in (tmp_path / "folder", tmp_path / "folder" / name):
        assert sorted(decoded(path, text_column="body", streaming=streaming).split("</s>")) == ["", "ab", "c"]


def test_markdown_files_are_documents(tmp_path):
    """Markdown files are read as documents, from a folder or alone: otherwise they would be ignored."""
    (tmp_path / "wiki").mkdir()
    (tmp_path / "wiki" / "notes.md").write_text("# Notes\n")
    assert decoded(tmp_path / "wiki") == decoded(tmp_path / "wiki" / "notes.md") == "# Notes\n</s>"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9", r"latin.txt is no valid text file: .*codec can't decode byte 0xe9"),
        ("image.txt", b"\x89PNG\0\0", r"image.txt is a binary file"),
        ("half.jsonl", b'{"text": "a"}\n{"text": ', r"half.jsonl is no valid json file: line 2"),
        ("none.jsonl", b"", r"none.jsonl is empty"),
        ("torn.parquet", b"PAR1 and no more", r"torn.parquet is no valid parquet file"),
    ],
)
def test_errors_name_the_file(tmp_path, name, content, message):
    """The error for a broken file names it: otherwise it could not be located among a thousand."""
    good = tmp_path / f"good{Path(name).suffix}"
    write_rows(good, [{"text": "fine"}]) if good.suffix != ".txt" else good.write_text("fine")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_splits(str(tmp_path), "--train_data", "train")


def test_kinds_are_not_mixed(tmp_path):
    """A folder of several kinds of data raises an error: otherwise a part of it would be ignored."""
    (tmp_path / "a.txt").write_text("a")
    write_rows(tmp_path / "b.jsonl", [{"text": "b"}])
    with pytest.raises(ValueError, match=r"several kinds \(json, text\)"):
        load_splits(str(tmp_path), "--train_data", "train")


def test_a_column_of_numbers_is_refused(tmp_path):
    """A text column of numbers raises an error that names it: otherwise the tokenizer would fail."""
    write_rows(tmp_path / "a.jsonl", [{"text": 5}])
    with pytest.raises(ValueError, match="the column text of the data holds int64, not text"):
        decoded(tmp_path / "a.jsonl")


class SlowTokenizer:
    """Marks the start of each call, as tokenizers with a prefix do, so that splitting a text changes its tokens."""

    eos_token_id = 1

    def __call__(self, texts, **options):
        return {"input_ids": [[2, *(ord(letter) for letter in text)] for text in texts]}


@pytest.mark.parametrize("text", ["word " * 900, "x" * 4000, "one\n\n two\t" * 400, "é " * 2000])
def test_long_texts_are_tokenized_as_a_whole(monkeypatch, text):
    """Splitting a long text for tokenizing changes no token: otherwise training would use ids that the tokenizer never
    gives.
    """
    monkeypatch.setattr(blocks_module, "PIECE_CHARACTERS", 256)
    monkeypatch.setattr(blocks_module, "CALL_CHARACTERS", 1024)
    for tokenizer in (byte_tokenizer(), SlowTokenizer()):
        (tokens,) = blocks_module.encode_texts([text], tokenizer)
        (expected,) = tokenizer([text], add_special_tokens=False)["input_ids"]
        assert tokens.tolist() == expected
    with monkeypatch.context() as patch:
        patch.setattr(blocks_module, "is_byte_tokenizer", lambda tokenizer: False)
        (tokens,) = blocks_module.encode_texts([text], byte_tokenizer())
        assert tokens.tolist() == byte_tokenizer()(text)["input_ids"]
    assert len(blocks_module.split_text("word " * 900, byte_tokenizer())) > 10
    assert blocks_module.split_text("word " * 900, SlowTokenizer()) == ["word " * 900]


def test_processes_tokenize_like_one(tmp_path, capsys):
    """Two processes give the tokens of one, in order, and later calls use the cache: otherwise documents would be mixed
    up.
    """
    documents = Dataset.from_dict({"text": [f"document {i} " * (i % 7) for i in range(50)]})
    tokenizer = load_tokenizer("bytes")
    alone = blocks_module.tokenize_documents(documents, ["text"], tokenizer, 1)
    shutil.rmtree(tmp_path / "cache" / "titans_hf")
    together = blocks_module.tokenize_documents(documents, ["text"], tokenizer, 2)
    assert together.documents["input_ids"][:] == alone.documents["input_ids"][:]
    assert "2 processes" in capsys.readouterr().out
    blocks_module.tokenize_documents(documents, ["text"], tokenizer, 2)
    assert "tokens/s" not in capsys.readouterr().out


def test_a_stream_trains_and_holds_out_its_first_documents(options, tmp_path):
    """A streamed data set is trained on except its first documents, which are evaluated on: otherwise evaluation would
    use training data.
    """
    write_rows(tmp_path / "rows.jsonl", [{"text": f"{i:03d} " * 20} for i in range(60)])
    arguments = DataArguments(
        train_data=str(tmp_path / "rows.jsonl"), streaming=True, block_length=32, max_eval_blocks=4
    )
    loaded = load_blocks(arguments, byte_tokenizer())
    evaluated = byte_tokenizer().decode(np.concatenate(loaded.evaluation["input_ids"]))
    trained = byte_tokenizer().decode(torch.cat([block["input_ids"] for block in loaded.train]))
    assert len(loaded.evaluation) == 4 and evaluated.startswith("000 ")
    assert "059" in trained and not {f"{i:03d}" for i in range(60) if f"{i:03d}" in evaluated} & set(trained.split())
    assert loaded.tokens_per_byte == pytest.approx(81 / 80)
    common = dict(train_data=tmp_path / "rows.jsonl", streaming="true", max_eval_blocks=4)
    metrics = train.main(options(TITANS, **SHORT, **common))
    assert math.isfinite(metrics["eval_loss"])
    with pytest.raises(ValueError, match="--streaming needs --max_steps"):
        train.main(options(TITANS, **common, max_steps=None, output_dir=tmp_path / "other"))
    with pytest.raises(ValueError, match="--carry_memory cannot be combined with --streaming"):
        train.main(options(TITANS, **common, carry_memory="true", output_dir=tmp_path / "other"))


def test_fine_tuning_starts_from_the_weights(options, tmp_path):
    """--model_name_or_path starts from a checkpoint and its tokenizer: otherwise the earlier training would be lost."""
    train.main(options(TITANS, **SHORT))
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    tuned = dict(config=None, tokenizer=None, model_name_or_path=tmp_path / "out", output_dir=tmp_path / "tuned")
    train.main(options(TITANS, **SHORT, **tuned, learning_rate=0.0))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").state_dict()
    assert all(torch.equal(start[name], after[name]) for name in start)
    card = (tmp_path / "tuned" / "README.md").read_text()
    assert "From out on texts" in card and "From scratch" not in card and str(tmp_path) not in card
    tuned |= dict(config_overrides="hidden_size=16", output_dir=tmp_path / "other")
    with pytest.raises(ValueError, match="--model_name_or_path"):
        train.main(options(TITANS, **SHORT, **tuned))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": None}, "give either --config, .*, or --model_name_or_path"),
        ({"model_name_or_path": "x"}, "give either --config, .*, or --model_name_or_path"),
        ({"tokenizer": None}, "--config needs a --tokenizer"),
        ({"preprocessing_num_workers": 0}, "--preprocessing_num_workers 0 must be at least 1"),
    ],
)
def test_options_that_contradict_are_refused(options, tmp_path, changes, message):
    """Contradicting or missing options raise an error that names them before any file is written: otherwise one of them
    would be ignored.
    """
    with pytest.raises(ValueError, match=message):
        train.main(options(**changes))
    assert not (tmp_path / "out").exists()


def test_weights_beside_a_configuration_are_mentioned(options, tmp_path):
    """--config FOLDER warns that the folder's weights are not used: otherwise a user would expect fine-tuning."""
    train.main(options(TITANS, **SHORT))
    for config in (tmp_path / "out", tmp_path / "out" / "config.json"):
        with pytest.warns(UserWarning, match=rf"starts from scratch, .*--model_name_or_path {tmp_path / 'out'}$"):
            train.main(options(TITANS, **SHORT, config=config, output_dir=tmp_path / config.name / "new"))
    assert unused_weights(str(tmp_path / "titans.json")) is None


def test_saved_configurations_use_the_cache(options, tmp_path):
    """Every saved configuration has use_cache true: with Trainer's false a plain call would return no memory."""
    train.main(options(TITANS, **SHORT))
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        assert json.loads((folder / "config.json").read_text())["use_cache"] is True
        assert AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[5, 6]])).past_key_values is not None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("memory_momentum=False", {"memory_momentum": False}),
        ("memory_momentum=false, hidden_size=48", {"memory_momentum": False, "hidden_size": 48}),
        ("eos_token_id=null,variant=lmm", {"variant": "lmm"}),
        ("rope_parameters.rope_theta=5e5", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        ('rope_parameters={"rope_theta": 7.0, "rope_type": "default"}', {"rope_parameters": {"rope_theta": 7.0}}),
    ],
)
def test_overrides_of_every_type(tmp_path, overrides, expected):
    """Overrides can be booleans, null, nested fields and dictionaries: otherwise such a change would need a file."""
    (tmp_path / "config.json").write_text(json.dumps(TITANS))
    arguments = ModelArguments(config=str(tmp_path / "config.json"), config_overrides=overrides)
    config = load_config(arguments, byte_tokenizer())
    for name, value in expected.items():
        actual = getattr(config, name)
        if isinstance(value, dict):
            assert value.items() <= dict(actual).items()
        else:
            assert actual == value and type(actual) is type(value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("memory_momentum=maybe", "(?s)--config_overrides memory_momentum=maybe: .*bool"),
        ("rope_parameters.rope_thetta=1", "there is no rope_parameters.rope_thetta, only .*rope_theta"),
        ("hidden_size.x=1", "there is no hidden_size.x"),
        ("hidden_size", "hidden_size has no value"),
    ],
)
def test_wrong_overrides_are_named(tmp_path, overrides, message):
    """A wrong override raises an error that names it: otherwise a misspelt setting would be ignored."""
    (tmp_path / "config.json").write_text(json.dumps(TITANS))
    arguments = ModelArguments(config=str(tmp_path / "config.json"), config_overrides=overrides)
    with pytest.raises(ValueError, match=message) as error:
        load_config(arguments, byte_tokenizer())
    assert "StrictDataclass" not in str(error.value)


def test_commas_within_values_do_not_split():
    """Commas within brackets and quotes belong to a value: otherwise lists could not be overridden."""
    assert split_overrides('a=[1,2],b={"x": "p,q"}, c=3') == ["a=[1,2]", 'b={"x": "p,q"}', "c=3"]


def test_shipped_configurations_have_names():
    """`--config tiny-mag` works from any folder: otherwise an installed command would need scripts/configs."""
    config = load_config(ModelArguments(config="tiny-mag"), byte_tokenizer())
    assert (config.model_type, config.variant) == ("titans", "mag")
    with pytest.raises(FileNotFoundError, match="--config tiny-mug: no such file or folder, nor a configuration"):
        load_config(ModelArguments(config="tiny-mug"), byte_tokenizer())


def test_too_few_steps_are_warned_of(options, capsys):
    """A warning before training names --tokens_per_step if steps are few: otherwise a small text would train almost
    nothing.
    """
    train.main(options(max_steps=None, eval_strategy="no", save_strategy="no", load_best_model_at_end="false"))
    assert "warning: 6 optimizer steps are too few to learn from. Give a smaller --tokens_per_step" in (
        capsys.readouterr().out
    )


def test_a_finished_run_says_so(options, tmp_path, capsys):
    """Repeating a finished run's command trains nothing and reports that: otherwise it would fail, or train over the
    run.
    """
    metrics = train.main(options(**SHORT))
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert train.main(options(**SHORT)) == metrics
    assert "is finished: 2 of 2 steps" in capsys.readouterr().out
    assert train.main(options(**SHORT, resume_from_checkpoint="true")) == metrics
    assert "is finished: 2 of 2 steps" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before
    train.main(options(max_steps=4, eval_steps=2, save_steps=2, resume_from_checkpoint="true"))
    assert json.loads((tmp_path / "out" / "run.json").read_text())["steps"] == 4


@pytest.mark.parametrize("damage", ["trainer_state.json", "model.safetensors", "optimizer.pt"])
def test_a_checkpoint_that_was_cut_off_is_skipped(options, tmp_path, damage):
    """Resuming skips an incomplete checkpoint with a warning: otherwise a run killed while saving could not be
    resumed.
    """
    whole = train.main(options(LLAMA))
    last = tmp_path / "out" / "checkpoint-8"
    assert what_is_missing(last) is None
    (tmp_path / "out" / "run.json").unlink()  # the run had not ended
    if damage == "trainer_state.json":
        (last / damage).unlink()
    else:
        data = (last / damage).read_bytes()
        (last / damage).write_bytes(data[: len(data) // 2])
    with pytest.warns(UserWarning, match=rf"checkpoint-8 is incomplete and skipped: .*{damage}"):
        resumed = train.main(options(LLAMA, resume_from_checkpoint="true"))
    assert resumed["eval_loss"] == whole["eval_loss"]
    (last / "trainer_state.json").write_text("{")
    with pytest.raises(ValueError, match="checkpoint-8 is incomplete"):
        train.main(options(LLAMA, resume_from_checkpoint=last))


def test_the_byte_tokenizer_is_recognized(tmp_path):
    """The byte tokenizer, made or loaded, is recognized and encodes as itself; with another token it is not: otherwise
    the fast path would give wrong ids.
    """
    byte_tokenizer().save_pretrained(tmp_path)
    assert is_byte_tokenizer(byte_tokenizer()) and is_byte_tokenizer(load_tokenizer(str(tmp_path)))
    other = byte_tokenizer()
    other.add_tokens(["whale"])
    assert not is_byte_tokenizer(other)
    text = "".join(map(chr, range(0x2FF))) + "東京 🎉</s>"
    (tokens,) = blocks_module.encode_texts([text], byte_tokenizer())
    lines = text.replace("\r", "\n")  # as every text is read
    assert tokens.tolist() == byte_tokenizer()(lines, split_special_tokens=True)["input_ids"]

"""Data of training: files of every kind, data sets and streams, and what is held out of them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import covering
from datasets import Dataset, DatasetDict
from tiny_run import SHORT, TITANS, real_tokens

from titans_hf.cli import train
from titans_hf.cli.training import data
from titans_hf.cli.training.arguments import RunArguments
from titans_hf.cli.training.data import load_blocks, load_splits, make_blocks
from titans_hf.cli.training.tokenizer import byte_tokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")


def decoded(path: Path, **changes) -> str:
    arguments = RunArguments(train_data=str(path), eval_data=str(path), block_length=1000, **changes)
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
    """Of a table only the text column is learnt."""
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / name, [{"body": "ab", "id": 1}, {"body": "c", "id": 2}])
    (tmp_path / "folder" / "README.md").write_text("not data")
    for path in (tmp_path / "folder", tmp_path / "folder" / name):
        assert sorted(decoded(path, text_column="body", streaming=streaming).split("</s>")) == ["", "ab", "c"]


def test_markdown_files_are_documents(tmp_path):
    """Markdown files are read as documents, from a folder or alone."""
    (tmp_path / "wiki").mkdir()
    (tmp_path / "wiki" / "notes.md").write_text("# Notes\n")
    assert decoded(tmp_path / "wiki") == decoded(tmp_path / "wiki" / "notes.md") == "# Notes\n</s>"


@covering(
    1,
    {
        "name,content,message": [
            ("latin.txt", b"caf\xe9", r"latin.txt is no valid text file: .*codec can't decode byte 0xe9"),
            ("image.txt", b"\x89PNG\0\0", r"image.txt is no valid text file: .*codec can't decode byte 0x89"),
            ("pair.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', r"pair.jsonl is no valid json file: "),
            ("half.jsonl", b'{"text": "a"}\n{"text": ', r"half.jsonl is no valid json file: "),
            ("torn.parquet", b"PAR1 and no more", r"torn.parquet is no valid parquet file"),
            ("far.txt", b"a" * 9000 + b"\xe9", r"far.txt is no valid text file: .*codec can't decode byte 0xe9"),
            ("latin.csv", b"text\ncaf\xe9\n", r"latin.csv is no valid csv file: .*codec can't decode byte 0xe9"),
        ],
        "good": ["first", "last", "none"],
    },
)
def test_errors_name_the_file(tmp_path, name, content, message, good):
    """The error for a broken file names it, alone or among others."""
    if good != "none":
        path = tmp_path / f"{'a' if good == 'first' else 'z'}{Path(name).suffix}"
        rows = {".txt": "fine", ".csv": "text\nfine\n"}.get(path.suffix)
        write_rows(path, [{"text": "fine"}]) if rows is None else path.write_text(rows)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        decoded(tmp_path)


def test_empty_files(tmp_path):
    """Empty files beside others hold nothing; files that are all empty raise an error that names one."""
    for name in ("some", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "some" / "a.jsonl").touch()
    write_rows(tmp_path / "some" / "b.jsonl", [{"text": "b"}])
    assert decoded(tmp_path / "some") == "b</s>"
    (tmp_path / "none" / "empty.txt").touch()
    for path in (tmp_path / "none", tmp_path / "none" / "empty.txt"):
        with pytest.raises(ValueError, match=r"--train_data .* holds no text: .*empty\.txt is empty"):
            load_splits(str(path), "--train_data", "train")


@pytest.mark.parametrize("name,text", [("a.csv", 'id,text\n1,"a, b"\n'), ("a.tsv", "id\ttext\n1\ta, b\n")])
def test_tables_of_text_files(tmp_path, name, text):
    """Of comma- and tab-separated files the text column is learnt."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).write_text(text)
    assert decoded(tmp_path / "folder") == decoded(tmp_path / "folder" / name) == "a, b</s>"


def test_markdown_beside_text_is_read(tmp_path):
    """Of a folder of text, Markdown files but a README.md are read."""
    (tmp_path / "folder").mkdir()
    for name in ("a.txt", "notes.md", "README.md"):
        (tmp_path / "folder" / name).write_text(name)
    assert decoded(tmp_path / "folder") == "a.txt</s>notes.md</s>"


def test_conversations_are_for_another_command(tmp_path):
    """Data of conversations is refused with the command that trains on them."""
    write_rows(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "Who?"}]}])
    with pytest.raises(ValueError, match=r"'messages': 'lists'}; `trl sft` trains on conversations"):
        decoded(tmp_path / "chats.jsonl")


def test_kinds_are_not_mixed(tmp_path):
    """A folder of several kinds of data raises an error."""
    (tmp_path / "a.txt").write_text("a")
    write_rows(tmp_path / "b.jsonl", [{"text": "b"}])
    with pytest.raises(ValueError, match=r"several kinds \(\.jsonl, \.txt\)"):
        load_splits(str(tmp_path), "--train_data", "train")


def test_a_column_of_numbers_is_refused(tmp_path):
    """A text column of numbers raises an error that names it."""
    write_rows(tmp_path / "a.jsonl", [{"text": 5}])
    with pytest.raises(ValueError, match=r"no text in a --text_column text, but \{'text': 'int64'\}"):
        decoded(tmp_path / "a.jsonl")


def test_held_out_blocks_are_the_last(texts):
    """The last blocks are held out and the others kept."""
    tokenizer = load_tokenizer("bytes")
    arguments = RunArguments(train_data=str(texts), eval_fraction=0.2, block_length=32)
    blocks, _ = make_blocks(load_splits(str(texts), "--train_data", "train")["train"], arguments, tokenizer)
    kept, held_out, _ = load_blocks(arguments, tokenizer)
    assert len(held_out) == round(0.2 * len(blocks))
    assert real_tokens(kept) + real_tokens(held_out) == real_tokens(blocks)


def test_saved_data_set_brings_its_validation_split(tmp_path):
    """A saved data set's validation split is used for evaluation."""
    splits = {"train": Dataset.from_dict({"body": ["aaaa", "bb"]}), "validation": Dataset.from_dict({"body": ["cc"]})}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    tokenizer = load_tokenizer("bytes")
    arguments = RunArguments(train_data=str(tmp_path / "saved"), text_column="body", block_length=32)
    kept, validation, _ = load_blocks(arguments, tokenizer)
    assert tokenizer.decode(real_tokens(kept)) == "aaaa</s>bb</s>"
    assert tokenizer.decode(real_tokens(validation)) == "cc</s>"


def test_a_data_set_of_the_hub_is_streamed(monkeypatch):
    """A name that is no path is loaded from the Hub with its configuration, and --streaming streams it."""
    called = []

    def load_dataset(*args, **kwargs):
        called.append((args, kwargs))
        return {"train": Dataset.from_dict({"text": ["ab", "c", "d"]}).to_iterable_dataset()}

    monkeypatch.setattr(data, "load_dataset", load_dataset)
    arguments = RunArguments(
        train_data="someone/texts", dataset_config="en", streaming=True, block_length=3, max_eval_blocks=1
    )
    loaded = load_blocks(arguments, byte_tokenizer())
    assert called == [(("someone/texts", "en"), {"streaming": True})]
    assert byte_tokenizer().decode(loaded.evaluation[0]["input_ids"]) == "ab</s>"
    trained = torch.cat([block["input_ids"] for block in loaded.train])
    assert sorted(byte_tokenizer().decode(trained).split("</s>")) == ["c", "d"]


def test_a_stream_trains_and_holds_out_its_first_documents(options, tmp_path):
    """A streamed data set is trained on except its first documents, which are evaluated on."""
    write_rows(tmp_path / "rows.jsonl", [{"text": f"{i:03d} " * 20} for i in range(60)])
    arguments = RunArguments(
        train_data=str(tmp_path / "rows.jsonl"), streaming=True, block_length=32, max_eval_blocks=4
    )
    loaded = load_blocks(arguments, byte_tokenizer())
    evaluated = byte_tokenizer().decode(np.concatenate([block["input_ids"] for block in loaded.evaluation]))
    trained = byte_tokenizer().decode(torch.cat([block["input_ids"] for block in loaded.train]))
    assert len(loaded.evaluation) == 4 and evaluated.startswith("000 ")
    assert "059" in trained and not {f"{i:03d}" for i in range(60) if f"{i:03d}" in evaluated} & set(trained.split())
    assert loaded.tokens_per_byte == pytest.approx(81 / 80)
    common = dict(train_data=tmp_path / "rows.jsonl", streaming="true", max_eval_blocks=4)
    metrics = train.main(options(TITANS, **SHORT, **common))
    assert math.isfinite(metrics["eval_loss"])
    with pytest.raises(ValueError, match=r"no text beside the held-out documents: give --eval_data"):
        train.main(options(TITANS, **SHORT, **common | dict(max_eval_blocks=1000), output_dir=tmp_path / "other"))
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        train.main(options(TITANS, **common, max_steps=None, output_dir=tmp_path / "other"))
    with pytest.raises(ValueError, match="--carry_memory cannot be combined with --streaming"):
        train.main(options(TITANS, **common, carry_memory="true", output_dir=tmp_path / "other"))

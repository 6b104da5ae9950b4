"""Data of training: files of every kind, data sets and streams, and what is held out of them."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from covering import in_one_test
from datasets import Dataset, DatasetDict
from tiny_run import SHORT, TITANS, real_tokens

from titans_hf.cli import train
from titans_hf.cli.training import data
from titans_hf.cli.training.data import load_blocks, load_splits, make_blocks
from titans_hf.cli.training.tokenizer import byte_tokenizer, load_tokenizer
from titans_hf_console import RunArguments

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")


def decoded(path: Path, **changes) -> str:
    arguments = RunArguments(train_data=str(path), eval_data=str(path), block_length=1000, **changes)
    loaded = load_blocks(arguments, byte_tokenizer())
    return "".join(byte_tokenizer().decode(block["input_ids"]) for block in loaded.train)


def write_rows(path: Path, rows: list[dict]) -> None:
    table = pd.DataFrame(rows)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        table.to_csv(path, sep="," if path.suffix == ".csv" else "\t", index=False)
    else:
        table.to_json(path, orient="records", lines=path.suffix == ".jsonl")


@pytest.mark.parametrize("streaming", [False, True])
@in_one_test("kind", ["jsonl", "json", "parquet", "csv", "tsv"])
def test_rows_give_their_text_column(tmp_path, kind, streaming):
    """Of a table, a file or in a folder beside an empty one, only the text column is learnt."""
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "README.md").write_text("not data")
    (tmp_path / kind / f"empty.{kind}").touch()
    write_rows(file := tmp_path / kind / f"rows.{kind}", [{"body": "a, b", "id": 1}, {"body": "c", "id": 2}])
    for path in (tmp_path / kind, file):
        assert sorted(decoded(path, text_column="body", streaming=streaming).split("</s>")) == ["", "a, b", "c"]


@in_one_test(
    "name,content,message",
    [
        ("latin.txt", b"caf\xe9", "text file: .*codec can't decode byte 0xe9"),
        ("half.jsonl", b'{"text": "a"}\n{"text": ', "json file: "),
        ("torn.parquet", b"PAR1 and no more", "parquet file"),
        ("latin.csv", b"text\ncaf\xe9\n", "csv file: .*codec can't decode byte 0xe9"),
    ],
)
def test_errors_name_the_file(tmp_path, name, content, message):
    """The error for a broken file among others names it."""
    (folder := tmp_path / name.replace(".", "-")).mkdir()
    good = folder / f"a{Path(name).suffix}"
    good.write_text("fine") if good.suffix == ".txt" else write_rows(good, [{"text": "fine"}])
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is not a valid {message}"):
        decoded(folder)


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
    given = dict(dataset_config="en", streaming=True, block_length=3, max_eval_blocks=1)
    loaded = load_blocks(RunArguments(train_data="someone/texts", **given), byte_tokenizer())
    assert called == [(("someone/texts", "en"), {"streaming": True})]
    assert byte_tokenizer().decode(loaded.evaluation[0]["input_ids"]) == "ab</s>"
    trained = torch.cat([block["input_ids"] for block in loaded.train])
    assert sorted(byte_tokenizer().decode(trained).split("</s>")) == ["c", "d"]


def test_a_stream_trains_and_holds_out_its_first_documents(options, tmp_path):
    """A streamed data set is trained on except its first documents, which are evaluated on."""
    write_rows(tmp_path / "rows.jsonl", [{"text": f"{i:03d} " * 20} for i in range(60)])
    given = dict(streaming=True, block_length=32, max_eval_blocks=4)
    loaded = load_blocks(RunArguments(train_data=str(tmp_path / "rows.jsonl"), **given), byte_tokenizer())
    evaluated = byte_tokenizer().decode(np.concatenate([block["input_ids"] for block in loaded.evaluation]))
    trained = byte_tokenizer().decode(torch.cat([block["input_ids"] for block in loaded.train]))
    assert len(loaded.evaluation) == 4 and evaluated.startswith("000 ")
    assert "059" in trained and not {f"{i:03d}" for i in range(60) if f"{i:03d}" in evaluated} & set(trained.split())
    assert loaded.tokens_per_byte == pytest.approx(81 / 80)
    common = dict(train_data=tmp_path / "rows.jsonl", streaming="true", max_eval_blocks=4)
    metrics = train.main(options(TITANS, **SHORT, **common))
    assert math.isfinite(metrics["eval_loss"])

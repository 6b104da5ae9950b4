"""Blocks of training: tokenizing documents, packing them, and collating the blocks."""

import json
import math
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from tiny_run import real_tokens
from transformers import ByT5Tokenizer

from titans_hf.cli import train
from titans_hf.cli.training.data import (
    PackedBlocks,
    RepeatedPassages,
    collate,
    count_tokens,
    encode_texts,
    load_blocks,
    load_splits,
    make_blocks,
)
from titans_hf.cli.training.tokenizer import byte_tokenizer, is_byte_tokenizer, load_tokenizer
from titans_hf_console import RunArguments

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")


def arguments(block_length: int) -> RunArguments:
    return RunArguments(train_data="", block_length=block_length)


@pytest.mark.parametrize("block_length", [2, 7, 32, 10_000, None])
def test_packing_loses_no_text(texts, block_length):
    """Blocks join to all documents, each with an eos, in order. A last block of an eos alone is dropped."""
    tokenizer = load_tokenizer("bytes")
    documents = load_splits(str(texts), "--train_data", "train")["train"]
    encoded = [path.read_bytes() for path in sorted(texts.rglob("*.txt"))]
    stream = [token for text in encoded for token in [*(byte + 3 for byte in text), tokenizer.eos_token_id]]
    block_length = block_length or len(stream) - 1
    blocks, tokens_per_byte = make_blocks(documents, arguments(block_length), tokenizer)
    assert real_tokens(blocks) == stream[: len(stream) - (len(stream) % block_length == 1)]
    assert {len(blocks[i]["input_ids"]) for i in range(len(blocks) - 1)} <= {block_length}
    assert count_tokens(blocks) == len(real_tokens(blocks))
    assert tokens_per_byte == len(real_tokens(blocks)) / len(b"".join(encoded))


@pytest.mark.parametrize("streaming", [False, True])
def test_bytes_are_those_of_what_is_tokenized(tmp_path, streaming):
    """Lines that end in a carriage return too have as many bytes as tokens."""
    ratios = []
    for end in ("\n", "\r\n", "\r"):
        file = tmp_path / f"{len(ratios)}.jsonl"
        file.write_text("".join(json.dumps({"text": f"line {i}{end}" * 9}) + "\n" for i in range(40)))
        given = dict(block_length=32, streaming=streaming, max_eval_blocks=8, eval_data=str(file))
        ratios.append(load_blocks(RunArguments(train_data=str(file), **given), byte_tokenizer()).tokens_per_byte)
    assert ratios[0] == ratios[1] == ratios[2]


def test_rows_that_are_blocks_are_learnt_where_their_labels_say(options, tmp_path, monkeypatch):
    """Rows of input_ids and labels are blocks as they are: padded, in their order, and learnt where labels are."""
    rows = {"input_ids": [[5, 6, 7, 1], [8, 1], [9, 9, 1]], "labels": [[-100, -100, 7, 1], [8, 1], [-100, 9, 1]]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    common = dict(train_data=tmp_path / "rows", eval_data=tmp_path / "rows", max_steps=2, tokens_per_step=64)
    seen = []
    monkeypatch.setattr(train, "collate", lambda blocks: seen.append(collate(blocks)) or seen[-1])
    metrics = train.main(options(train_sampling_strategy="sequential", **common))
    assert seen[0]["labels"].tolist() == [[-100, -100, 7, 1], [8, 1, -100, -100]]
    assert seen[0]["input_ids"][0].tolist() == [5, 6, 7, 1] and seen[0]["attention_mask"][1].tolist() == [1, 1, 0, 0]
    assert math.isfinite(metrics["eval_loss"]) and "eval_bits_per_byte" not in metrics


def test_tokens_are_cached(texts, tmp_path):
    """A second start writes no file of the cache anew."""

    def start() -> tuple[list[int], dict]:
        documents = load_splits(str(texts), "--train_data", "train")["train"]
        blocks, _ = make_blocks(documents, arguments(32), load_tokenizer("bytes"))
        written = {path: path.stat() for path in (tmp_path / "cache").rglob("*.arrow")}
        return real_tokens(blocks), {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in written.items()}

    first = start()
    assert len(first[1]) == 2  # texts and tokens
    assert start() == first


def test_memory_does_not_grow_with_the_text(tmp_path):
    """However many documents there are, few are held at once, and no tokens: they stay in the files of `datasets`."""

    def most_bytes(number: int) -> int:
        """Returns the most bytes that numpy, Python and Arrow hold while so many files are tokenized."""
        (tmp_path / f"{number}").mkdir()
        for i in range(number):
            (tmp_path / f"{number}" / f"{i:03}.txt").write_text(f"Band {i}. {'Es war einmal. ' * 2**14}")
        own, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
        pa.set_memory_pool(pool)
        tracemalloc.start()
        try:
            blocks = load_blocks(RunArguments(train_data=str(tmp_path / f"{number}")), load_tokenizer("bytes"))
            assert count_tokens(blocks.train) > 240_000 * number
            return tracemalloc.get_traced_memory()[1] + pool.max_memory()
        finally:
            tracemalloc.stop()
            pa.set_memory_pool(own)

    most_bytes(1)  # imports and caches of the libraries
    small, large = most_bytes(8), most_bytes(40)
    assert large < small + 4e6


def test_the_byte_tokenizer(tmp_path):
    """The byte tokenizer has ByT5's ids without an eos, decodes exactly, and is recognized until it has another."""
    byte_tokenizer().save_pretrained(tmp_path)
    text = "".join(map(chr, range(0x2FF))) + "東京 🎉</s>"
    lines, byt5, other = text.replace("\r", "\n"), ByT5Tokenizer(extra_ids=0), byte_tokenizer()  # as every text is read
    for tokenizer in (byte_tokenizer(), load_tokenizer(str(tmp_path))):
        ids = tokenizer(text, split_special_tokens=True).input_ids
        assert len(tokenizer) == len(byt5) == 259 and tokenizer.decode(ids) == text
        assert tokenizer(text[:-4]).input_ids == byt5(text[:-4], add_special_tokens=False).input_ids == ids[:-4]
        for name in ("pad_token_id", "eos_token_id", "unk_token_id"):
            assert getattr(tokenizer, name) == getattr(byt5, name)
        (tokens,) = encode_texts([lines], tokenizer)
        assert is_byte_tokenizer(tokenizer) and tokens.tolist() == tokenizer(lines, split_special_tokens=True).input_ids
    other.add_tokens(["whale"])
    assert not is_byte_tokenizer(other)


def test_passages_come_again():
    """Passages come again, 70 tokens or more after they ended, in all blocks or about the given share of them."""
    tokens = PackedBlocks(pa.chunked_array([pa.array(range(200 * 1024), pa.int32())]), 1024)
    for index in range(20):
        block = RepeatedPassages(tokens, 1.0, seed=0)[index]["input_ids"].tolist()
        first = {}
        for place, token in enumerate(block):
            assert place - first[token] > 70 if token in first else token == index * 1024 + len(first)
            first.setdefault(token, place)
        assert len(block) == 1024 and 0.15 < len(first) / 1024 < 0.95
    share = np.mean([len(set(x["input_ids"].tolist())) < 1024 for x in RepeatedPassages(tokens, 0.3, seed=0)])
    assert 0.2 < share < 0.4

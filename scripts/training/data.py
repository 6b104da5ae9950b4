"""Text for training: a tokenizer, documents, and the fixed-length blocks that they are cut into."""

import glob
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, DatasetDict, Features, List, Value, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The vocabulary of ByT5Tokenizer, which itself would end every prompt to be continued with </s>."""
    letters = bytes_to_unicode()
    tokens = ["<pad>", "</s>", "<unk>", *(letters[byte] for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer() if name == "bytes" else AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--tokenizer {name} has no eos token, which has to separate the documents")
    return tokenizer


def load_splits(source: str, split: str, dataset_config: str | None) -> dict[str, Dataset]:
    """The splits of a data set; text and data without splits become the given one."""
    path = Path(source)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        data = load_from_disk(source)
        return data if isinstance(data, DatasetDict) else {split: data}
    if path.exists():
        files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
        if not files:
            raise FileNotFoundError(f"{source} holds no .txt files")
        # Escaped, because load_dataset silently skips files with [ or * in their names otherwise.
        names = [glob.escape(str(file)) for file in files]
        return {split: load_dataset("text", data_files=names, sample_by="document", split="train")}
    missing = FileNotFoundError(f"{source} is neither a file, nor a folder, nor a data set to be had from the hub")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
        raise missing
    try:
        return load_dataset(source, dataset_config)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise missing from error


def cut_blocks(
    documents: Dataset, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, block_length: int
) -> Iterator[dict[str, np.ndarray | int]]:
    """All documents as one stream, each ended by eos, in blocks of which only the last may be shorter."""
    rest = np.empty(0, dtype=np.int32)
    for batch in documents.iter(batch_size=8):
        # Text that looks like a special token ("</s>") is text.
        encoded = tokenizer(batch[columns[0]], add_special_tokens=False, split_special_tokens=True, verbose=False)
        pieces = [np.array([*tokens, tokenizer.eos_token_id], dtype=np.int32) for tokens in encoded["input_ids"]]
        stream = np.concatenate([rest, *pieces])
        end = len(stream) - len(stream) % block_length
        for block in stream[:end].reshape(-1, block_length):
            yield {"input_ids": block, "prompt_length": 0}
        rest = stream[end:]
    # A single token can only be the last eos, and leaves nothing to predict: its mean loss would be 0 / 0.
    if len(rest) > 1:
        yield {"input_ids": rest, "prompt_length": 0}


def whole_documents(
    documents: Dataset, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, block_length: int
) -> Iterator[dict[str, np.ndarray | int]]:
    """Every document as a block of its own, ended by eos; of two columns, the first is a prompt, not to be learnt.

    Raises ValueError for one of more than `block_length` tokens.
    """
    for i, document in enumerate(documents):
        texts = [document[column] for column in columns]
        parts = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        tokens = [*itertools.chain(*parts), tokenizer.eos_token_id]
        if len(tokens) > block_length:
            raise ValueError(
                f"document {i} has {len(tokens)} tokens with its eos, more than --block_length {block_length}: "
                "without --packing none is cut"
            )
        if len(tokens) > 1:
            yield {"input_ids": np.array(tokens, dtype=np.int32), "prompt_length": sum(map(len, parts[:-1]))}


def count_tokens(blocks: Dataset) -> int:
    lengths = (pc.list_value_length(table["input_ids"]) for table in blocks.with_format("arrow").iter(batch_size=1000))
    return sum(pc.sum(length).as_py() for length in lengths)


def text_columns(documents: Dataset, column: str, packing: bool) -> list[str]:
    """The columns that hold the text: the given one, or a prompt and its completion."""
    if column in documents.column_names:
        return [column]
    found = ", ".join(documents.column_names)
    if not {"prompt", "completion"} <= set(documents.column_names):
        raise ValueError(f"the data has no --text_column {column}, nor a prompt and a completion, only {found}")
    if packing:
        raise ValueError(f"the data has no --text_column {column}, only {found}: these need --packing false")
    return ["prompt", "completion"]


def make_blocks(
    documents: Dataset, column: str, tokenizer: PreTrainedTokenizerBase, block_length: int, packing: bool = True
) -> tuple[Dataset, float]:
    """The blocks, cached on disk, and how many tokens a byte of their text takes."""
    columns = text_columns(documents, column, packing)
    documents = documents.select_columns(columns)
    text_bytes = sum(pc.sum(pc.binary_length(documents.data.column(column))).as_py() or 0 for column in columns)
    if not text_bytes:
        raise ValueError("the data holds no text")
    cut = cut_blocks if packing else whole_documents
    try:
        blocks = Dataset.from_generator(
            cut,
            features=Features({"input_ids": List(Value("int32")), "prompt_length": Value("int32")}),
            gen_kwargs={
                "documents": documents,
                "columns": tuple(columns),  # a list would be shared out among processes
                "tokenizer": tokenizer,
                "block_length": block_length,
            },
            fingerprint=Hasher.hash([documents._fingerprint, cut, tokenizer, block_length]),
        ).with_format("torch")
    except DatasetGenerationError as error:  # which says no more than that there was one
        raise error.__cause__ from error
    return blocks, count_tokens(blocks) / text_bytes


def load_blocks(
    tokenizer: PreTrainedTokenizerBase,
    block_length: int,
    train_data: str,
    eval_data: str | None,
    eval_fraction: float,
    dataset_config: str | None,
    text_column: str,
    packing: bool,
) -> tuple[Dataset, Dataset, float]:
    """Blocks to train on, blocks to evaluate on, and the latter's tokens per byte."""
    blocks_of = partial(
        make_blocks, column=text_column, tokenizer=tokenizer, block_length=block_length, packing=packing
    )
    train_splits = load_splits(train_data, "train", dataset_config)
    eval_splits = load_splits(eval_data, "validation", dataset_config) if eval_data else train_splits
    if "train" not in train_splits:
        raise ValueError(f"{train_data} has no train split, only {', '.join(train_splits)}")
    if eval_data and "validation" not in eval_splits:
        raise ValueError(f"{eval_data} has no validation split, only {', '.join(eval_splits)}")
    train_blocks, tokens_per_byte = blocks_of(train_splits["train"])
    if "validation" in eval_splits:
        return train_blocks, *blocks_of(eval_splits["validation"])
    held_out = max(1, round(eval_fraction * len(train_blocks)))
    start = len(train_blocks) - held_out
    if start < 1:
        raise ValueError(f"too little text to hold out {held_out} of {len(train_blocks)} blocks: give --eval_data")
    return train_blocks.select(range(start)), train_blocks.select(range(start, len(train_blocks))), tokens_per_byte


def collate(blocks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads a short block on the right, where no other token of a causal model sees it."""
    ids = pad_sequence([block["input_ids"] for block in blocks], batch_first=True, padding_value=-100)
    prompt_lengths = torch.stack([block["prompt_length"] for block in blocks])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < prompt_lengths[:, None], -100)
    batch = {"input_ids": ids.clamp(min=0), "labels": labels}
    if (ids == -100).any():
        batch["attention_mask"] = (ids != -100).long()
    return batch

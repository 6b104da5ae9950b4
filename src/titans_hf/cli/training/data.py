"""The data of a run: documents, loaded and tokenized by `datasets`, and the blocks that they are cut into."""

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from titans_hf.cli.shared.hub import go_offline_without_network
from titans_hf.cli.shared.text_files import describe_files, find_files
from titans_hf.cli.shared.text_ids import encode, normalize_newlines
from titans_hf.cli.training.arguments import DataArguments
from titans_hf.cli.training.tokenizer import FIRST_BYTE, is_byte_tokenizer

# A document at a time: the builder of `datasets` would otherwise hold a thousand of them before it writes any.
TEXT = ("text", {"sample_by": "document", "writer_batch_size": 1})
# The builder of `datasets` for the files with a suffix, and its options.
BUILDERS = {".txt": TEXT, ".md": TEXT, ".json": ("json", {}), ".jsonl": ("json", {}), ".parquet": ("parquet", {})}
BUILDERS |= {".csv": ("csv", {}), ".tsv": ("csv", {"sep": "\t"})}
UNREADABLE = (DatasetGenerationError, ValueError, OSError)  # the errors of `datasets` for damaged data
FEATURES = Features({"input_ids": List(Value("int32")), "num_bytes": Value("int64")})  # bytes of UTF-8
CALL_BYTES = 1 << 19  # bytes of text that are tokenized in a call
PARALLEL_MIN_BYTES = 1 << 23  # bytes of text that are worth a second process
SHUFFLED_DOCUMENTS = 1000  # of a stream, from which the next one is drawn
PACKED_DOCUMENTS = 100  # of a stream, that are packed together
STREAMED_EVAL_BLOCKS = 100


class PackedBlocks(torch.utils.data.Dataset):
    """The tokens of all documents as one stream, cut into blocks of `block_length`; the last one may be shorter.

    The tokens stay in the file of `datasets`, and a block is read from there when it is asked for.

    tokens: (all tokens,), the stream.
    chosen: the numbers of the blocks; by default all.
    """

    def __init__(self, tokens: pa.ChunkedArray, block_length: int, chosen: Sequence[int] | None = None):
        self.tokens, self.block_length = tokens, block_length
        # A single token can only be the last eos: there is nothing to predict, and its mean loss would be 0 / 0.
        whole, rest = divmod(len(tokens), block_length)
        self.chosen = range(whole + (rest > 1)) if chosen is None else chosen

    def select(self, indices: Iterable[int]) -> "PackedBlocks":
        return PackedBlocks(self.tokens, self.block_length, [self.chosen[i] for i in indices])

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.tokens.slice(self.chosen[index] * self.block_length, self.block_length)
        return {"input_ids": torch.from_numpy(block.to_numpy().astype(np.int64))}


class Blocks(NamedTuple):
    """The blocks of a run, and the tokens per byte of the text that evaluation blocks come from; None if unknown."""

    train: PackedBlocks | Dataset | IterableDataset
    evaluation: PackedBlocks | Dataset
    tokens_per_byte: float | None


def load_blocks(args: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Blocks:
    """Loads the data that `args` describes.

    Without evaluation data these are the last blocks of the training data, or the first documents of a stream. `seed`
    shuffles a stream. Raises ValueError or OSError for data that cannot be used.
    """
    train_splits = load_splits(args.train_data, "--train_data", "train", args.dataset_config, args.streaming)
    eval_splits = train_splits
    if args.eval_data:
        eval_splits = load_splits(args.eval_data, "--eval_data", "validation", args.dataset_config, args.streaming)
    if "train" not in train_splits:
        raise ValueError(f"--train_data {args.train_data} has no train split, only {', '.join(train_splits)}")
    if args.eval_data and "validation" not in eval_splits:
        raise ValueError(f"--eval_data {args.eval_data} has no validation split, only {', '.join(eval_splits)}")
    train, validation = train_splits["train"], eval_splits.get("validation")
    if args.streaming:
        num_blocks = args.max_eval_blocks or STREAMED_EVAL_BLOCKS
        if validation is None:  # every document is a block at least
            validation, train = train.take(num_blocks), train.skip(num_blocks)
        evaluation, tokens_per_byte = make_blocks(Dataset.from_list(list(validation.take(num_blocks))), args, tokenizer)
        evaluation = evaluation.select(range(min(num_blocks, len(evaluation))))
        return Blocks(_stream(train, args, tokenizer, seed), evaluation, tokens_per_byte)
    train, tokens_per_byte = make_blocks(train, args, tokenizer)
    if validation is not None:
        evaluation, tokens_per_byte = make_blocks(validation, args, tokenizer)
    else:
        start = len(train) - max(1, round(args.eval_fraction * len(train)))
        if start < 1:
            raise ValueError(f"too little text to hold out blocks: there are {len(train)} in all: give --eval_data")
        evaluation, train = train.select(range(start, len(train))), train.select(range(start))
    if args.max_eval_blocks and args.max_eval_blocks < len(evaluation):
        evaluation = evaluation.select(np.linspace(0, len(evaluation) - 1, args.max_eval_blocks, dtype=int))
    return Blocks(train, evaluation, tokens_per_byte)


def make_blocks(
    documents: Dataset, args: DataArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[PackedBlocks | Dataset, float | None]:
    """Makes the blocks; returns them with the number of tokens per byte, None for rows that are blocks already."""
    if {"input_ids", "labels"} <= {*documents.column_names}:
        return documents.with_format("torch", ["input_ids", "labels"]), None
    check_text_column(documents, args.text_column)
    tokenized = tokenize(documents, args.text_column, tokenizer, args.preprocessing_num_workers)
    num_bytes = pc.sum(tokenized.data.column("num_bytes")).as_py()
    if not num_bytes:
        raise ValueError("the data holds no text")
    chunks = [chunk.flatten() for chunk in tokenized.data.column("input_ids").chunks]
    blocks = PackedBlocks(pa.chunked_array(chunks), args.block_length)
    return blocks, count_tokens(blocks) / num_bytes


def tokenize(
    documents: Dataset, column: str, tokenizer: PreTrainedTokenizerBase, num_workers: int | None = None
) -> Dataset:
    """Tokenizes all documents into a file in the cache of `datasets`, by `num_workers` processes.

    By default there are as many processes as cores, and one for less than 8 MB.
    """
    num_bytes = documents.data.nbytes
    if num_workers is None:
        num_workers = len(os.sched_getaffinity(0)) if num_bytes >= PARALLEL_MIN_BYTES else 1
    num_workers = max(1, min(num_workers, len(documents)))
    if num_workers > 1:  # the processes are the parallelism
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    batch_size = max(1, min(1000, CALL_BYTES * len(documents) // max(1, num_bytes)))
    return documents.map(
        tokenize_batch,
        batched=True,
        batch_size=batch_size,
        writer_batch_size=batch_size,
        num_proc=num_workers if num_workers > 1 else None,
        remove_columns=documents.column_names,
        features=FEATURES,
        fn_kwargs={"column": column, "tokenizer": tokenizer},
        desc="tokenizing",
    )


def tokenize_batch(
    batch: dict[str, list[str | None]], column: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list]:
    """Tokenizes documents, each ended by eos."""
    texts = [normalize_newlines(text or "") for text in batch[column]]
    eos = np.array([tokenizer.eos_token_id], dtype=np.int32)
    ids = [np.concatenate([tokens, eos]) for tokens in encode_texts(texts, tokenizer)]
    return {"input_ids": ids, "num_bytes": [len(text.encode()) for text in texts]}


def encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Tokenizes texts; returns an int32 array (T,) for each, without special tokens."""
    if is_byte_tokenizer(tokenizer):  # a hundred times faster than by the tokenizer
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + FIRST_BYTE for text in texts]
    return [np.array(ids, dtype=np.int32) for ids in encode(tokenizer, texts, return_attention_mask=False)["input_ids"]]


def _stream(
    documents: IterableDataset, args: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int
) -> IterableDataset:
    """Tokenizes and packs the documents of a stream while they are read."""
    first = next(iter(documents), None)
    if first is None:
        raise ValueError(
            f"--train_data {args.train_data} has no text beside the documents that are held out: give --eval_data or a "
            "smaller --max_eval_blocks"
        )
    documents = documents.shuffle(seed=seed, buffer_size=SHUFFLED_DOCUMENTS)
    if {"input_ids", "labels"} <= first.keys():
        return documents.with_format("torch")
    tokens = documents.map(
        tokenize_batch,
        batched=True,
        batch_size=1,
        remove_columns=list(first),
        fn_kwargs={"column": args.text_column, "tokenizer": tokenizer},
    )
    length = {"block_length": args.block_length}
    return tokens.map(
        pack_batch, batched=True, batch_size=PACKED_DOCUMENTS, remove_columns=["num_bytes"], fn_kwargs=length
    ).with_format("torch")


def pack_batch(batch: dict[str, list], block_length: int) -> dict[str, list]:
    """Joins some documents of a stream and cuts them into blocks."""
    tokens = np.concatenate(batch["input_ids"])
    blocks = [tokens[i : i + block_length] for i in range(0, len(tokens), block_length)]
    return {"input_ids": [block for block in blocks if len(block) > 1]}


def count_tokens(blocks: PackedBlocks | Dataset) -> int:
    """Counts the tokens of all blocks."""
    if isinstance(blocks, PackedBlocks):
        return sum(min(blocks.block_length, len(blocks.tokens) - i * blocks.block_length) for i in blocks.chosen)
    return sum(map(len, blocks.with_format(None)["input_ids"]))


def collate(blocks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads short blocks on the right; labels of padding are -100. A block without labels is learnt whole."""
    ids = pad_sequence([block["input_ids"] for block in blocks], batch_first=True, padding_value=-100)
    labels = [block.get("labels", block["input_ids"]) for block in blocks]
    batch = {"input_ids": ids.clamp(min=0), "labels": pad_sequence(labels, batch_first=True, padding_value=-100)}
    if (ids == -100).any():
        batch["attention_mask"] = (ids != -100).long()
    return batch


def load_splits(
    source: str, argument: str, split: str, dataset_config: str | None = None, streaming: bool = False
) -> Mapping[str, Dataset | IterableDataset]:
    """Loads the splits of a data set; files, and data sets without splits, become the split of the given name.

    Args:
        source: a file, a folder of files, a data set saved by `save_to_disk`, or the name of one on the Hub.
        argument: the name of the option in errors, as in "--train_data".

    Raises ValueError, which names the file, for data that cannot be read; FileNotFoundError where there is none.
    """
    path = Path(source)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():  # of save_to_disk
        data = load_from_disk(source)
        splits = data if isinstance(data, DatasetDict) else {split: data}
        return {name: data.to_iterable_dataset() for name, data in splits.items()} if streaming else splits
    if path.exists():
        return {split: _load_files(path, argument, streaming)}
    missing = FileNotFoundError(f"{argument} {source} is neither a file, nor a folder, nor a data set on the Hub")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
        raise missing
    go_offline_without_network(source)
    try:
        return load_dataset(source, dataset_config, streaming=streaming)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise missing from error


def _load_files(path: Path, argument: str, streaming: bool) -> Dataset | IterableDataset:
    """Loads a file, of text if its suffix is unknown, or the files of a folder, which are all of one kind."""
    found = find_files(path, argument, tuple(BUILDERS))
    if description := describe_files(path, found):
        PartialState().print(description)
    builder, options = BUILDERS.get(found[0].suffix.lower(), TEXT)
    if any(BUILDERS.get(file.suffix.lower(), TEXT) != (builder, options) for file in found):
        suffixes = ", ".join(sorted({file.suffix.lower() for file in found}))
        raise ValueError(f"{argument} {path} holds files of several kinds ({suffixes}): give one kind")
    if not any(file.stat().st_size for file in found):
        raise ValueError(f"{argument} {path} holds no text: {found[0]} is empty")
    files = [file for file in found if builder == "text" or file.stat().st_size]  # an empty text is a document

    def load(files: list[Path]) -> Dataset | IterableDataset:
        # Escaped, because load_dataset silently skips files with [ or * in their names otherwise.
        names = [glob.escape(str(file)) for file in files]
        return load_dataset(builder, data_files=names, split="train", streaming=streaming, **options)

    try:
        return load(files)
    except UNREADABLE as error:  # whose message names no file
        for file in files:
            try:
                load([file])
            except UNREADABLE as reason:
                cause = reason.__cause__ or reason
                raise ValueError(f"{argument}: {file} is no valid {builder} file: {cause}") from reason
        raise ValueError(f"{argument} {path}: {error.__cause__ or error}") from error


def check_text_column(documents: Dataset, column: str) -> None:
    """Raises ValueError for documents without the column of text, or with something else than text in it."""
    if column not in documents.features:
        present = ", ".join(documents.features)
        other = "; `trl sft` trains on conversations, and on prompts and completions (docs/finetune.md)"
        raise ValueError(f"the data has no --text_column {column}, only {present}{other}")
    kind = getattr(documents.features[column], "dtype", "lists")
    if kind not in ("string", "large_string"):
        raise ValueError(f"the column {column} of the data holds {kind}, not text: choose a --text_column")

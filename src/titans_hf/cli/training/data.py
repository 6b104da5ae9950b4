"""The data of a run: documents, loaded and tokenized by `datasets`, and the blocks that they are cut into."""

import glob
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase as Tokenizer

from titans_hf.cli.shared.hub import go_offline_without_network
from titans_hf.cli.shared.text_files import find_files, normalize_newlines
from titans_hf.cli.shared.text_ids import encode
from titans_hf.cli.training.tokenizer import FIRST_BYTE, is_byte_tokenizer
from titans_hf_console import RunArguments

# A document at a time: the builder of `datasets` would otherwise hold a thousand of them before it writes any.
# A byte order mark at the beginning of a text is not part of it.
TEXT = ("text", {"sample_by": "document", "writer_batch_size": 1, "encoding": "utf-8-sig"})
# The builder of `datasets` for the files with a suffix, and its options.
BUILDERS = {".txt": TEXT, ".md": TEXT, ".json": ("json", {}), ".jsonl": ("json", {}), ".parquet": ("parquet", {})}
BUILDERS |= {".csv": ("csv", {}), ".tsv": ("csv", {"sep": "\t"})}
UNREADABLE = (DatasetGenerationError, ValueError, OSError)  # the errors of `datasets` for damaged data
FEATURES = Features({"input_ids": List(Value("int32")), "num_bytes": Value("int64")})  # the text's, in UTF-8
CALL_BYTES = 1 << 19  # bytes of text that are tokenized in a call
SHUFFLED_DOCUMENTS = 1000  # of a stream, held at once: the next document is drawn from them
PACKED_DOCUMENTS = 100  # of a stream, that are packed together
STREAMED_EVAL_BLOCKS = 100


class PackedBlocks(torch.utils.data.Dataset):
    """The tokens of all documents as one stream, cut into blocks of `block_length`; the last one may be shorter.

    The tokens stay in the file of `datasets`, and a block is read from there on request.

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


class RepeatedPassages(torch.utils.data.Dataset):
    """Blocks of T tokens, in a share of which T / 256 to T / 128 earlier passages of 16 to 160 tokens come again, at
    least 70 tokens after they ended. What no longer fits is cut off. A block is the same whenever it is read.
    """

    def __init__(self, blocks: PackedBlocks, share: float, seed: int):
        self.blocks, self.share, self.seed = blocks, share, seed

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        source, random = self.blocks[index]["input_ids"], np.random.default_rng((self.seed, index))
        length = len(source)
        if random.random() >= self.share or length < 256:
            return {"input_ids": source}
        text, used = source[:0], 0
        for place in sorted(random.integers(180, length, random.integers(length // 256, length // 128 + 1))):
            read = max(0, place - len(text))
            text, used = torch.cat([text, source[used : used + read]]), used + read
            size = random.integers(16, 161)
            if (last := len(text) - size - 70) >= 0:
                start = random.integers(last + 1)
                text = torch.cat([text, text[start : start + size]])
        return {"input_ids": torch.cat([text, source[used:]])[:length]}


class Blocks(NamedTuple):
    """The blocks of a run, and the tokens per byte of the text that evaluation blocks come from; None if unknown."""

    train: PackedBlocks | Dataset | IterableDataset
    evaluation: PackedBlocks | Dataset
    tokens_per_byte: float | None


def load_blocks(args: RunArguments, tokenizer: Tokenizer, seed: int = 0) -> Blocks:
    """Loads the data that `args` describes.

    Without evaluation data, evaluation takes the last blocks of the training data, or the first documents of a stream.
    `seed` shuffles a stream. Raises ValueError or OSError for data that cannot be used.
    """
    load = partial(load_splits, dataset_config=args.dataset_config, streaming=args.streaming)
    splits = load(args.train_data, "--train_data", "train")
    train, validation = splits["train"], splits.get("validation")
    if args.eval_data:
        validation = load(args.eval_data, "--eval_data", "validation")["validation"]
    if args.streaming:
        num_blocks = args.max_eval_blocks or STREAMED_EVAL_BLOCKS
        if validation is None:  # every document is at least one block
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
    documents: Dataset, args: RunArguments, tokenizer: Tokenizer
) -> tuple[PackedBlocks | Dataset, float | None]:
    """Tokenizes documents into the cache of `datasets` and makes their blocks; rows that are blocks already stay as
    they are.

    Returns the blocks and the number of tokens per byte, None for rows that were blocks. Raises ValueError for
    documents without text.
    """
    if {"input_ids", "labels"} <= {*documents.column_names}:
        return documents.with_format("torch", ["input_ids", "labels"]), None
    kinds = {name: getattr(feature, "dtype", "lists") for name, feature in documents.features.items()}
    if kinds.get(args.text_column) not in ("string", "large_string"):
        raise ValueError(
            f"the data has no text in a --text_column {args.text_column}, but {kinds}; `trl sft` trains on "
            "conversations, and on prompts and completions (docs/finetune.md)"
        )
    batch_size = max(1, min(1000, CALL_BYTES * len(documents) // max(1, documents.data.nbytes)))
    tokenized = documents.map(
        tokenize_batch,
        batched=True,
        batch_size=batch_size,
        writer_batch_size=batch_size,
        num_proc=args.preprocessing_num_workers,
        remove_columns=documents.column_names,
        features=FEATURES,
        fn_kwargs={"column": args.text_column, "tokenizer": tokenizer},
        desc="tokenizing",
    )
    num_bytes = pc.sum(tokenized.data.column("num_bytes")).as_py()
    if not num_bytes:
        raise ValueError("the data holds no text")
    chunks = [chunk.flatten() for chunk in tokenized.data.column("input_ids").chunks]
    blocks = PackedBlocks(pa.chunked_array(chunks), args.block_length)
    return blocks, count_tokens(blocks) / num_bytes


def tokenize_batch(batch: dict[str, list[str | None]], column: str, tokenizer: Tokenizer) -> dict[str, list]:
    """Tokenizes documents, each ended by eos."""
    texts = [normalize_newlines(text or "") for text in batch[column]]
    eos = np.array([tokenizer.eos_token_id], dtype=np.int32)
    ids = [np.concatenate([tokens, eos]) for tokens in encode_texts(texts, tokenizer)]
    return {"input_ids": ids, "num_bytes": [len(text.encode()) for text in texts]}


def encode_texts(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Tokenizes texts; returns an int32 array (T,) for each, without special tokens."""
    if is_byte_tokenizer(tokenizer):  # a hundred times faster than by the tokenizer
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + FIRST_BYTE for text in texts]
    return [np.array(ids, dtype=np.int32) for ids in encode(tokenizer, texts, return_attention_mask=False)["input_ids"]]


def _stream(documents: IterableDataset, args: RunArguments, tokenizer: Tokenizer, seed: int) -> IterableDataset:
    """Tokenizes and packs the documents of a stream while they are read."""
    first = next(iter(documents), None)
    if first is None:
        raise ValueError("the stream has no text beside the held-out documents: give --eval_data or --max_eval_blocks")
    documents = documents.shuffle(seed=seed, buffer_size=SHUFFLED_DOCUMENTS)
    if {"input_ids", "labels"} <= first.keys():
        return documents.with_format("torch")
    read = partial(tokenize_batch, column=args.text_column, tokenizer=tokenizer)
    tokens = documents.map(read, batched=True, batch_size=1, remove_columns=list(first))
    pack = partial(pack_batch, block_length=args.block_length)
    blocks = tokens.map(pack, batched=True, batch_size=PACKED_DOCUMENTS, remove_columns=["num_bytes"])
    return blocks.with_format("torch")


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
    """Joins blocks to a batch, padded on the right; it has an attention_mask only if a block is shorter than another.
    All tokens of a block without labels are learnt.
    """
    ids = [block["input_ids"] for block in blocks]
    labels = [block.get("labels", block["input_ids"]) for block in blocks]
    batch = {"input_ids": pad_sequence(ids, True), "labels": pad_sequence(labels, True, -100)}
    lengths = torch.tensor([len(row) for row in ids])
    if (lengths < lengths.max()).any():
        batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return batch


def load_splits(
    source: str, argument: str, split: str, dataset_config: str | None = None, streaming: bool = False
) -> Mapping[str, Dataset | IterableDataset]:
    """Loads the splits of a data set; files, and data sets without splits, become the split of the given name.

    Args:
        source: a file, a folder of files, a data set saved by `save_to_disk`, or the name of one on the Hub.
        argument: the name of the option in errors, as in "--train_data".

    Raises ValueError, which names the file, for data that cannot be read; FileNotFoundError if there is none.
    """
    path = Path(source)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():  # of save_to_disk
        data = load_from_disk(source)
        splits = data if isinstance(data, DatasetDict) else {split: data}
        if streaming:
            splits = {name: data.to_iterable_dataset() for name, data in splits.items()}
    elif path.exists():
        splits = {split: _load_files(path, argument, streaming)}
    else:
        go_offline_without_network(source)
        try:
            splits = load_dataset(source, dataset_config, streaming=streaming)
        except (FileNotFoundError, ConnectionError) as error:
            missing = f"{argument} {source} is neither a file, nor a folder, nor a data set on the Hub: {error}"
            raise FileNotFoundError(missing) from error
    if split not in splits:
        raise ValueError(f"{argument} {source} has no {split} split, only {', '.join(splits)}")
    return splits


def _load_files(path: Path, argument: str, streaming: bool) -> Dataset | IterableDataset:
    """Loads a file (as text if its suffix is unknown), or the files of a folder, which must be of one kind."""
    found = find_files(path, argument, tuple(BUILDERS))
    PartialState().print(f"{path}: {len(found)} {'file' if len(found) == 1 else 'files'}")
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
                raise ValueError(f"{argument}: {file} is not a valid {builder} file: {cause}") from reason
        raise ValueError(f"{argument} {path}: {error.__cause__ or error}") from error

"""The data of a run: documents, loaded and tokenized by `datasets`, and the blocks that they are cut into."""

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from titans_hf.cli.shared.hub import go_offline_without_network
from titans_hf.cli.shared.text_files import describe_files, find_files
from titans_hf.cli.shared.text_ids import encode, newline_decoder, normalize_newlines
from titans_hf.cli.training.arguments import DataArguments
from titans_hf.cli.training.tokenizer import FIRST_BYTE, is_byte_tokenizer

# The builder of `datasets` for the files of a kind, and its options.
BUILDERS = {
    # A document at a time: the builder would otherwise hold a thousand of them before it writes any.
    "text": ("text", {"sample_by": "document", "writer_batch_size": 1}),
    "json": ("json", {}),
    "csv": ("csv", {}),
    "tsv": ("csv", {"sep": "\t"}),
    "parquet": ("parquet", {}),
}
KINDS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv"}
KINDS |= {".parquet": "parquet"}
UNREADABLE = (DatasetGenerationError, ValueError, OSError)  # the errors of `datasets` for damaged data
# num_bytes: of UTF-8, of what is learnt
FEATURES = Features({"input_ids": List(Value("int32")), "prompt_length": Value("int32"), "num_bytes": Value("int64")})
CALL_BYTES = 1 << 19  # bytes of text that are tokenized in a call
PARALLEL_MIN_BYTES = 1 << 23  # bytes of text that are worth a second process
SHUFFLED_DOCUMENTS = 1000  # of a stream, from which the next one is drawn
PACKED_DOCUMENTS = 100  # of a stream, that are packed together
STREAMED_EVAL_BLOCKS = 100


class PackedBlocks(torch.utils.data.Dataset):
    """The tokens of all documents as one stream, cut into blocks of `block_length`; the last one may be shorter.

    The tokens stay in the file of `datasets`, and a block is read from there when it is asked for. An item has
    `input_ids` (T,) and `prompt_length`, which is 0.

    documents: with their tokens in the column input_ids, as `tokenize` makes them.
    chosen: the numbers of the blocks; by default all.
    """

    def __init__(self, documents: Dataset, block_length: int, chosen: Sequence[int] | None = None):
        self.documents, self.block_length = documents, block_length
        self.parts = [chunk.flatten().to_numpy() for chunk in documents.data.column("input_ids").chunks]
        self.ends = np.cumsum([len(part) for part in self.parts], dtype=np.int64)
        self.num_tokens = int(self.ends[-1]) if len(self.ends) else 0
        # A single token can only be the last eos: there is nothing to predict, and its mean loss would be 0 / 0.
        whole, rest = divmod(self.num_tokens, block_length)
        self.chosen = range(whole + (rest > 1)) if chosen is None else chosen

    def select(self, indices: Iterable[int]) -> "PackedBlocks":
        return PackedBlocks(self.documents, self.block_length, [self.chosen[i] for i in indices])

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.chosen[index] * self.block_length
        end = min(start + self.block_length, self.num_tokens)
        first, last = np.searchsorted(self.ends, [start, end - 1], side="right")
        pieces = []
        for i in range(first, last + 1):
            begin = int(self.ends[i]) - len(self.parts[i])
            pieces.append(self.parts[i][max(0, start - begin) : end - begin])
        return {"input_ids": torch.from_numpy(np.concatenate(pieces)).long(), "prompt_length": torch.tensor(0)}

    def count_tokens(self) -> int:
        return sum(min(self.block_length, self.num_tokens - i * self.block_length) for i in self.chosen)


class Blocks(NamedTuple):
    """The blocks of a run, and the tokens per byte of the text that evaluation blocks come from, without prompts."""

    train: PackedBlocks | Dataset | IterableDataset
    evaluation: PackedBlocks | Dataset
    tokens_per_byte: float


def load_blocks(args: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Blocks:
    """Loads the data that `args` describes.

    Without evaluation data these are the last blocks of the training data, or the first documents of a stream. `seed`
    shuffles a stream. Raises ValueError or OSError for data that cannot be used.
    """
    load = partial(load_splits, dataset_config=args.dataset_config, streaming=args.streaming)
    train_splits = load(args.train_data, "--train_data", "train")
    eval_splits = load(args.eval_data, "--eval_data", "validation") if args.eval_data else train_splits
    if "train" not in train_splits:
        raise ValueError(f"--train_data {args.train_data} has no train split, only {', '.join(train_splits)}")
    if args.eval_data and "validation" not in eval_splits:
        raise ValueError(f"--eval_data {args.eval_data} has no validation split, only {', '.join(eval_splits)}")
    if args.streaming:
        return _stream(args, tokenizer, train_splits["train"], eval_splits.get("validation"), seed)
    options = (args.text_column, tokenizer, args.block_length, args.packing, args.preprocessing_num_workers)
    train, tokens_per_byte = make_blocks(train_splits["train"], *options)
    if "validation" in eval_splits:
        evaluation, tokens_per_byte = make_blocks(eval_splits["validation"], *options)
    else:
        start = len(train) - max(1, round(args.eval_fraction * len(train)))
        if start < 1:
            raise ValueError(f"too little text to hold out blocks: there are {len(train)} in all: give --eval_data")
        evaluation, train = train.select(range(start, len(train))), train.select(range(start))
    if args.max_eval_blocks and args.max_eval_blocks < len(evaluation):
        evaluation = evaluation.select(np.linspace(0, len(evaluation) - 1, args.max_eval_blocks, dtype=int))
    return Blocks(train, evaluation, tokens_per_byte)


def make_blocks(
    documents: Dataset,
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    block_length: int,
    packing: bool = True,
    num_workers: int | None = None,
) -> tuple[PackedBlocks | Dataset, float]:
    """Makes the blocks; returns them with the number of learnt tokens per byte of what is learnt."""
    tokenized = tokenize(documents, text_columns(documents, column, packing), tokenizer, num_workers)
    prompt_tokens, num_bytes = (pc.sum(tokenized.data.column(x)).as_py() for x in ("prompt_length", "num_bytes"))
    if not num_bytes:
        raise ValueError("the data holds no text")
    if packing:
        blocks = PackedBlocks(tokenized, block_length)
    else:
        blocks = tokenized.filter(fits, fn_kwargs={"block_length": block_length})
        blocks = blocks.with_format("torch", ["input_ids", "prompt_length"])
    return blocks, (count_tokens(blocks) - prompt_tokens) / num_bytes


def tokenize(
    documents: Dataset, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_workers: int | None = None
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
        fn_kwargs={"columns": tuple(columns), "tokenizer": tokenizer},
        desc="tokenizing",
    )


def tokenize_batch(
    batch: dict[str, list[str | None]], columns: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list]:
    """Tokenizes documents, each ended by eos. Of two columns the first is a prompt, whose tokens are not learnt."""
    texts = [[normalize_newlines(text or "") for text in batch[column]] for column in columns]
    ids = [encode_texts(column, tokenizer) for column in texts]
    eos = np.array([tokenizer.eos_token_id], dtype=np.int32)
    return {
        "input_ids": [np.concatenate([*document, eos]) for document in zip(*ids, strict=True)],
        "prompt_length": [sum(map(len, document[:-1])) for document in zip(*ids, strict=True)],
        "num_bytes": [len(text.encode()) for text in texts[-1]],
    }


def encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Tokenizes texts; returns an int32 array (T,) for each, without special tokens."""
    if is_byte_tokenizer(tokenizer):  # a hundred times faster than by the tokenizer
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + FIRST_BYTE for text in texts]
    return [np.array(ids, dtype=np.int32) for ids in encode(tokenizer, texts, return_attention_mask=False)["input_ids"]]


def fits(row: dict[str, list], block_length: int) -> bool:
    """Returns True for a document that can be a block. Raises ValueError for one of more than `block_length` tokens."""
    length = len(row["input_ids"])
    if length > block_length:
        raise ValueError(
            f"a document has {length} tokens with its eos, more than --block_length {block_length}: "
            "without --packing none is cut"
        )
    return length > 1


def pack_batch(batch: dict[str, list], block_length: int) -> dict[str, list]:
    """Joins some documents of a stream and cuts them into blocks."""
    tokens = np.concatenate(batch["input_ids"])
    blocks = [tokens[i : i + block_length] for i in range(0, len(tokens), block_length)]
    blocks = [block for block in blocks if len(block) > 1]
    return {"input_ids": blocks, "prompt_length": [0] * len(blocks)}


def _stream(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    train: IterableDataset,
    validation: IterableDataset | None,
    seed: int,
) -> Blocks:
    train = train if train.features else train._resolve_features()
    columns = text_columns(train, args.text_column, args.packing)
    num_blocks = args.max_eval_blocks or STREAMED_EVAL_BLOCKS
    if validation is None:  # every document is a block at least
        validation, train = train.take(num_blocks), train.skip(num_blocks)
        if next(iter(train), None) is None:
            raise ValueError(
                f"--train_data {args.train_data} has no text beside the {num_blocks} documents that are held out: give "
                "--eval_data or a smaller --max_eval_blocks"
            )
    held_out = Dataset.from_list(list(validation.take(num_blocks)))
    evaluation, tokens_per_byte = make_blocks(held_out, args.text_column, tokenizer, args.block_length, args.packing)
    evaluation = evaluation.select(range(min(num_blocks, len(evaluation))))
    documents = train.shuffle(seed=seed, buffer_size=SHUFFLED_DOCUMENTS).map(
        tokenize_batch,
        batched=True,
        batch_size=1,
        remove_columns=list(train.features),
        fn_kwargs={"columns": columns, "tokenizer": tokenizer},
    )
    length = {"block_length": args.block_length}
    if args.packing:
        blocks = documents.map(
            pack_batch, batched=True, batch_size=PACKED_DOCUMENTS, remove_columns=["num_bytes"], fn_kwargs=length
        )
    else:
        blocks = documents.filter(fits, fn_kwargs=length).remove_columns("num_bytes")
    return Blocks(blocks.with_format("torch"), evaluation, tokens_per_byte)


def count_tokens(blocks: PackedBlocks | Dataset) -> int:
    """Counts the tokens of all blocks."""
    if isinstance(blocks, PackedBlocks):
        return blocks.count_tokens()
    tables = blocks.with_format("arrow").iter(batch_size=1000)
    return sum(pc.sum(pc.list_value_length(table["input_ids"])).as_py() for table in tables)


def collate(blocks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads short blocks on the right; labels of padding and of prompts are -100."""
    ids = pad_sequence([block["input_ids"].long() for block in blocks], batch_first=True, padding_value=-100)
    prompt_lengths = torch.stack([block["prompt_length"] for block in blocks])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < prompt_lengths[:, None], -100)
    batch = {"input_ids": ids.clamp(min=0), "labels": labels}
    if (ids == -100).any():
        batch["attention_mask"] = (ids != -100).long()
    return batch


def is_saved_data_set(path: Path) -> bool:
    """Returns True for a folder that `save_to_disk` wrote."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def describe_source(source: str, argument: str) -> str | None:
    """Describes which files of a folder are read and which are left out; None for any other source of documents."""
    path = Path(source)
    if not path.is_dir() or is_saved_data_set(path):
        return None
    return describe_files(path, choose_files(path, argument)[1])


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
    if is_saved_data_set(path):
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
    kind, files = choose_files(path, argument)
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"{argument} {path} holds no text: {files[0]} is empty")
    builder, options = BUILDERS[kind]

    def load(files: list[Path], streaming: bool = streaming) -> Dataset | IterableDataset:
        # Escaped, because load_dataset silently skips files with [ or * in their names otherwise.
        names = [glob.escape(str(file)) for file in files]
        return load_dataset(builder, data_files=names, split="train", streaming=streaming, **options)

    for file in files:
        try:
            _check(file, kind)
        except (ValueError, OSError) as error:  # a UnicodeDecodeError or pa.ArrowInvalid among them
            raise ValueError(f"{argument}: {file} is no valid {kind} file: {error}") from error
    try:
        return load(files)
    except UNREADABLE as error:  # whose message names no file
        for file in files:
            try:
                load([file], streaming=False)
            except UNREADABLE as reason:
                cause = reason.__cause__ or reason
                raise ValueError(f"{argument}: {file} is no valid {kind} file: {cause}") from reason
        raise ValueError(f"{argument} {path}: {error.__cause__ or error}") from error


def _check(file: Path, kind: str) -> None:
    """Raises ValueError for a file that is empty or not UTF-8, which a builder may read without an error."""
    if kind == "parquet":
        pa.parquet.read_metadata(file)
    elif kind != "text" and not file.stat().st_size:
        raise ValueError("it is empty")
    else:
        decoder = newline_decoder()
        with file.open("rb") as stream:
            while data := stream.read(1 << 20):
                if b"\0" in data:
                    raise ValueError("it is binary")
                decoder.decode(data)
        decoder.decode(b"", True)


def choose_files(path: Path, argument: str) -> tuple[str, list[Path]]:
    """Lists the data files of a path, and their kind.

    A single file with an unknown suffix is text. Raises ValueError for a folder without data files, or with files of
    several kinds.
    """
    files = find_files(path, argument, tuple(KINDS))
    if path.is_file():
        return KINDS.get(path.suffix.lower(), "text"), files
    kinds = sorted({KINDS[file.suffix.lower()] for file in files})
    if len(kinds) > 1:
        raise ValueError(f"{argument} {path} holds files of several kinds ({', '.join(kinds)}): give one kind")
    return kinds[0], files


def text_columns(documents: Dataset | IterableDataset, column: str, packing: bool) -> list[str]:
    """Chooses the columns of text: the given one, or a prompt and its completion.

    Raises ValueError where there are none of these, or where they hold something else than text.
    """
    features = documents.features or documents._resolve_features().features
    names = [column] if column in features else ["prompt", "completion"]
    present = ", ".join(features)
    if not set(names) <= set(features):
        if chats := {"messages", "conversations"} & {*features}:
            raise ValueError(
                f"the data has conversations (column {chats.pop()}), and this command trains on text: `trl sft` trains "
                "on conversations (docs/finetune.md)"
            )
        raise ValueError(f"the data has no --text_column {column}, nor a prompt and a completion, only {present}")
    if len(names) > 1 and packing:
        raise ValueError(f"the data has no --text_column {column}, only {present}: these need --packing false")
    for name in names:
        kind = getattr(features[name], "dtype", type(features[name]).__name__)
        if kind not in ("string", "large_string"):
            raise ValueError(f"the column {name} of the data holds {kind}, not text: choose a --text_column")
    return names

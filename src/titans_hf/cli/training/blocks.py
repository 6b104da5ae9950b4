"""Token blocks for training: documents are tokenized in parallel, then cut into blocks of a fixed length."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.arrow_writer import ArrowWriter
from datasets.fingerprint import Hasher
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from titans_hf.cli.shared.text_ids import encode, normalize_newlines
from titans_hf.cli.training.documents import UNREADABLE, text_columns
from titans_hf.cli.training.tokenizer import FIRST_BYTE, is_byte_tokenizer

FEATURES = Features({"input_ids": List(Value("int32")), "prompt_length": Value("int32")})
PIECE_CHARACTERS = 1 << 15  # characters of a longer text that are tokenized at once
CALL_CHARACTERS = 1 << 19  # characters in a call of the tokenizer
PARALLEL_MIN_BYTES = 1 << 23  # bytes of text that are worth a second process
COMPARED_CHARACTERS = 64  # characters on both sides of a cut on which the cut is checked
MAX_TRIES = 8


class Tokenized(NamedTuple):
    """One row per document: `input_ids` with the eos, and `prompt_length`. `num_bytes` of UTF-8 without prompts."""

    documents: Dataset
    num_bytes: int


def split_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Cuts a long text before single spaces and line breaks where this changes no token.

    At every cut the tokens of its surroundings, whole and cut, are compared.
    """
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        for _ in range(MAX_TRIES):
            end = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
            if end <= start or _cut_changes_nothing(text, end, tokenizer):
                break
        else:
            end = start
        if end <= start:  # no place to cut: the rest goes in one piece
            break
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _cut_changes_nothing(text: str, cut: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    left, right = text[max(0, cut - COMPARED_CHARACTERS) : cut], text[cut : cut + COMPARED_CHARACTERS]
    whole, first, second = _encode([left + right, left, right], tokenizer)
    return whole == first + second


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return encode(tokenizer, texts, return_attention_mask=False)["input_ids"]


def encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Tokenizes texts of any length in bounded memory; one int32 array (T,) per text, without special tokens."""
    texts = [normalize_newlines(text) for text in texts]
    if is_byte_tokenizer(tokenizer):  # a hundred times faster than by the tokenizer
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + FIRST_BYTE for text in texts]
    pieces = [(i, piece) for i, text in enumerate(texts) for piece in split_text(text, tokenizer)]
    tokens: list[list[np.ndarray]] = [[] for _ in texts]
    call: list[tuple[int, str]] = []
    for i, piece in [*pieces, (None, "")]:
        if call and (i is None or sum(len(text) for _, text in call) + len(piece) > CALL_CHARACTERS):
            for (owner, _), ids in zip(call, _encode([text for _, text in call], tokenizer), strict=True):
                tokens[owner].append(np.array(ids, dtype=np.int32))
            call = []
        call.append((i, piece))
    return [np.concatenate(parts) if parts else np.empty(0, np.int32) for parts in tokens]


def tokenize_batch(
    batch: dict[str, list[str | None]], columns: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list]:
    """Tokenizes documents, each ended by eos. Of two columns the first is a prompt, whose tokens are not learnt."""
    parts = [encode_texts([text or "" for text in batch[column]], tokenizer) for column in columns]
    eos = np.array([tokenizer.eos_token_id], dtype=np.int32)
    return {
        "input_ids": [np.concatenate([*document, eos]) for document in zip(*parts, strict=True)],
        "prompt_length": [sum(map(len, document[:-1])) for document in zip(*parts, strict=True)],
    }


def count_bytes(texts: pa.ChunkedArray) -> int:
    """Counts the bytes of texts as they are tokenized: a line may end in \\r\\n, which counts as one."""
    length, ends = pc.sum(pc.binary_length(texts)).as_py(), pc.sum(pc.count_substring(texts, "\r\n")).as_py()
    return (length or 0) - (ends or 0)


def tokenize_documents(
    documents: Dataset, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_workers: int | None = None
) -> Tokenized:
    """Tokenizes all documents, in `num_workers` processes, into a file in the cache of `datasets`.

    By default there are as many processes as cores, and one for less than 8 MB. Prints the speed. Raises ValueError
    for data without text.
    """
    documents = documents.select_columns(list(columns))
    if documents._indices is not None:
        documents = documents.flatten_indices()
    bytes_of = [count_bytes(documents.data.column(name)) for name in columns]
    num_bytes = sum(bytes_of)
    if not num_bytes:
        raise ValueError("the data holds no text")
    if num_workers is None:
        num_workers = len(os.sched_getaffinity(0)) if num_bytes >= PARALLEL_MIN_BYTES else 1
    num_workers = max(1, min(num_workers, len(documents)))
    if num_workers > 1:  # the processes are the parallelism
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    batch_size = max(1, min(1000, CALL_CHARACTERS * len(documents) // num_bytes))
    fingerprint = Hasher.hash([documents._fingerprint, tokenize_batch, tuple(columns), tokenizer])
    cache = _cache_folder()
    fresh, start = not list(cache.glob(f"tokens-{fingerprint}*")), time.monotonic()
    tokenized = documents.map(
        tokenize_batch,
        batched=True,
        batch_size=batch_size,
        writer_batch_size=batch_size,
        num_proc=num_workers if num_workers > 1 else None,
        remove_columns=list(columns),
        features=FEATURES,
        fn_kwargs={"columns": tuple(columns), "tokenizer": tokenizer},
        new_fingerprint=fingerprint,
        cache_file_name=str(cache / f"tokens-{fingerprint}.arrow"),
        desc="tokenizing",
    )
    if fresh and os.environ.get("RANK", "0") == "0":
        total, seconds = count_tokens(tokenized), time.monotonic() - start
        print(
            f"tokenized {total:,} tokens in {seconds:.1f} s: {total / seconds:,.0f} tokens/s, {num_workers} processes"
        )
    return Tokenized(tokenized, bytes_of[-1])


def pack_arrays(documents: Iterable[np.ndarray], block_length: int) -> Iterator[np.ndarray]:
    """Joins token arrays (T,) to one stream and cuts it into arrays of blocks (N, block_length).

    The last array may be a single shorter block.
    """
    rest: list[np.ndarray] = []
    length = 0
    for tokens in documents:
        rest.append(tokens)
        length += len(tokens)
        if length >= block_length:
            stream = np.concatenate(rest)
            end = length - length % block_length
            yield stream[:end].reshape(-1, block_length)
            rest, length = [stream[end:].copy()], length - end
    # A single token can only be the last eos: there is nothing to predict, and its mean loss would be 0 / 0.
    if length > 1:
        yield np.concatenate(rest)[None]


def pack_documents(documents: Dataset, block_length: int) -> Dataset:
    """Packs tokenized documents into blocks, in a file in the cache of `datasets`."""
    path = _cache_folder() / f"blocks-{Hasher.hash([documents._fingerprint, block_length])}.arrow"
    if not path.exists():
        # As they were written, a call of the tokenizer each: their sizes do not grow with the documents' number.
        batches = documents.data.to_batches()
        arrays = (batch.column("input_ids").flatten().to_numpy() for batch in batches)
        unfinished = path.with_suffix(f".{os.getpid()}")
        with ArrowWriter(features=FEATURES, path=str(unfinished)) as writer:
            for blocks in pack_arrays(arrays, block_length):
                writer.write_table(_block_table(blocks))
            writer.finalize()
        unfinished.replace(path)
    return Dataset.from_file(str(path))


def _block_table(blocks: np.ndarray) -> pa.Table:
    number, length = blocks.shape
    ids = pa.ListArray.from_arrays(np.arange(0, (number + 1) * length, length, dtype=np.int32), blocks.reshape(-1))
    return pa.table({"input_ids": ids, "prompt_length": np.zeros(number, np.int32)}, schema=FEATURES.arrow_schema)


def _cache_folder() -> Path:
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "titans_hf"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def keep_documents(documents: Dataset, block_length: int) -> Dataset:
    """Keeps every document as a block of its own. Raises ValueError for one of more than `block_length` tokens."""
    tables = documents.with_format("arrow").iter(batch_size=1000)
    lengths = np.concatenate([pc.list_value_length(table["input_ids"]).to_numpy() for table in tables])
    if (lengths > block_length).any():
        raise ValueError(_too_long(int(np.argmax(lengths > block_length)), lengths.max(), block_length))
    return documents.select(np.flatnonzero(lengths > 1))


def _too_long(index: int, length: int, block_length: int) -> str:
    return (
        f"document {index} has {length} tokens with its eos, more than --block_length {block_length}: "
        "without --packing none is cut"
    )


def make_blocks(
    documents: Dataset,
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    block_length: int,
    packing: bool = True,
    num_workers: int | None = None,
) -> tuple[Dataset, float]:
    """Makes the blocks, cached on disk; returns them with the number of learnt tokens per byte of what is learnt."""
    columns = text_columns(documents, column, packing)
    tokenized, num_bytes = tokenize_documents(documents, columns, tokenizer, num_workers)
    blocks = pack_documents(tokenized, block_length) if packing else keep_documents(tokenized, block_length)
    return blocks.with_format("torch"), count_tokens(blocks, learnt=True) / num_bytes


class StreamedBlocks(torch.utils.data.IterableDataset):
    """Blocks of a streamed data set, made while they are read. Items are those of `make_blocks`.

    find_damage: called where a document cannot be read; raises ValueError if it finds out why.
    """

    def __init__(
        self,
        documents: IterableDataset,
        columns: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        block_length: int,
        packing: bool,
        find_damage: Callable[[], None],
    ):
        self.documents, self.columns, self.tokenizer = documents, columns, tokenizer
        self.block_length, self.packing, self.find_damage = block_length, packing, find_damage
        self.num_documents = 0  # read so far in the iteration under way
        self.num_tokens = self.num_bytes = 0  # of them, without prompts

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        blocks = self._packed() if self.packing else self._whole()
        for block in blocks:
            yield {name: torch.as_tensor(value).long() for name, value in block.items()}

    def _documents(self) -> Iterator[dict[str, str]]:
        """Yields the documents; raises ValueError with the file, or the number, of one that cannot be read."""
        try:
            for document in self.documents:
                self.num_documents += 1
                yield document
        except UNREADABLE as error:  # whose message names nothing
            self.find_damage()
            raise ValueError(f"document {self.num_documents + 1} of the stream cannot be read: {error}") from error

    def _rows(self) -> Iterator[tuple[np.ndarray, int]]:
        self.num_documents = self.num_tokens = self.num_bytes = 0
        for document in self._documents():
            batch = {name: [document[name]] for name in self.columns}
            self.num_bytes += len(normalize_newlines(document[self.columns[-1]] or "").encode())
            tokenized = tokenize_batch(batch, self.columns, self.tokenizer)
            tokens, prompt_length = tokenized["input_ids"][0], tokenized["prompt_length"][0]
            self.num_tokens += len(tokens) - prompt_length
            yield tokens, prompt_length

    def _packed(self) -> Iterator[dict[str, np.ndarray | int]]:
        for blocks in pack_arrays((tokens for tokens, _ in self._rows()), self.block_length):
            for block in blocks:
                yield {"input_ids": block, "prompt_length": 0}

    def _whole(self) -> Iterator[dict[str, np.ndarray | int]]:
        for index, (tokens, prompt_length) in enumerate(self._rows()):
            if len(tokens) > self.block_length:
                raise ValueError(_too_long(index, len(tokens), self.block_length))
            if len(tokens) > 1:
                yield {"input_ids": tokens, "prompt_length": prompt_length}


def count_tokens(blocks: Dataset, learnt: bool = False) -> int:
    """Counts the tokens of all blocks or documents, or, if `learnt`, those that are no prompt's."""
    number = 0
    for table in blocks.with_format("arrow").iter(batch_size=1000):
        number += pc.sum(pc.list_value_length(table["input_ids"])).as_py()
        number -= pc.sum(table["prompt_length"]).as_py() if learnt else 0
    return number


def collate(blocks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads short blocks on the right; labels of padding and of prompts are -100."""
    ids = pad_sequence([block["input_ids"] for block in blocks], batch_first=True, padding_value=-100)
    prompt_lengths = torch.stack([block["prompt_length"] for block in blocks])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < prompt_lengths[:, None], -100)
    batch = {"input_ids": ids.clamp(min=0), "labels": labels}
    if (ids == -100).any():
        batch["attention_mask"] = (ids != -100).long()
    return batch

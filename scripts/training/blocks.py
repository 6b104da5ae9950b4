"""Token blocks for training: documents are tokenized in parallel, then cut into blocks of a fixed length."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from titans_hf_scripts.training.documents import text_columns

FEATURES = Features({"input_ids": List(Value("int32")), "prompt_length": Value("int32")})
PIECE = 1 << 15  # characters of a longer text that are tokenized at once
CALL = 1 << 19  # characters in a call of the tokenizer
PARALLEL_FROM = 1 << 23  # bytes of text that are worth a second process
MARGIN = 64  # characters on both sides of a cut on which the cut is checked
TRIES = 8


class Tokenized(NamedTuple):
    """One row per document: `input_ids` with the eos, and `prompt_length`. `num_bytes` of UTF-8 text."""

    documents: Dataset
    num_bytes: int


def split_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Cuts a long text before single spaces and line breaks where this changes no token.

    At every cut the tokens of its surroundings, whole and cut, are compared.
    """
    pieces, start = [], 0
    while len(text) - start > PIECE:
        end = start + PIECE
        for _ in range(TRIES):
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
    left, right = text[max(0, cut - MARGIN) : cut], text[cut : cut + MARGIN]
    whole, first, second = _encode([left + right, left, right], tokenizer)
    return whole == first + second


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    # Text that looks like a special token ("</s>") is text.
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    return tokenizer(texts, **options, verbose=False)["input_ids"]


def encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Tokenizes texts of any length in bounded memory; one int32 array (T,) per text, without special tokens."""
    pieces = [(i, piece) for i, text in enumerate(texts) for piece in split_text(text, tokenizer)]
    tokens: list[list[np.ndarray]] = [[] for _ in texts]
    call: list[tuple[int, str]] = []
    for i, piece in [*pieces, (None, "")]:
        if call and (i is None or sum(len(text) for _, text in call) + len(piece) > CALL):
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
    num_bytes = sum(pc.sum(pc.binary_length(documents.data.column(name))).as_py() or 0 for name in columns)
    if not num_bytes:
        raise ValueError("the data holds no text")
    if num_workers is None:
        num_workers = len(os.sched_getaffinity(0)) if num_bytes >= PARALLEL_FROM else 1
    num_workers = max(1, min(num_workers, len(documents)))
    if num_workers > 1:  # the processes are the parallelism
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    batch_size = max(1, min(1000, CALL * len(documents) // num_bytes))
    fingerprint = Hasher.hash([documents._fingerprint, tokenize_batch, tuple(columns), tokenizer])
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "titans_hf"
    cache.mkdir(parents=True, exist_ok=True)
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
    return Tokenized(tokenized, num_bytes)


def pack_blocks(documents: Iterable[np.ndarray], block_length: int) -> Iterator[dict[str, np.ndarray | int]]:
    """Joins token arrays to one stream and cuts it into blocks, of which only the last may be shorter."""
    rest: list[np.ndarray] = []
    length = 0
    for tokens in documents:
        rest.append(tokens)
        length += len(tokens)
        if length >= block_length:
            stream = np.concatenate(rest)
            end = length - length % block_length
            for block in stream[:end].reshape(-1, block_length):
                yield {"input_ids": block, "prompt_length": 0}
            rest, length = [stream[end:].copy()], length - end
    # A single token can only be the last eos: there is nothing to predict, and its mean loss would be 0 / 0.
    if length > 1:
        yield {"input_ids": np.concatenate(rest), "prompt_length": 0}


def _pack_saved(documents: Dataset, block_length: int) -> Iterator[dict[str, np.ndarray | int]]:
    tables = documents.with_format("arrow").iter(batch_size=64)
    yield from pack_blocks((table["input_ids"].combine_chunks().flatten().to_numpy() for table in tables), block_length)


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
    """Makes the blocks, cached on disk; returns them with the number of tokens per byte of their text."""
    columns = text_columns(documents, column, packing)
    tokenized, num_bytes = tokenize_documents(documents, columns, tokenizer, num_workers)
    if packing:
        try:
            blocks = Dataset.from_generator(
                _pack_saved,
                features=FEATURES,
                gen_kwargs={"documents": tokenized, "block_length": block_length},
                fingerprint=Hasher.hash([tokenized._fingerprint, _pack_saved, pack_blocks, block_length]),
            )
        except DatasetGenerationError as error:  # whose own message says nothing
            raise error.__cause__ from error
    else:
        blocks = keep_documents(tokenized, block_length)
    return blocks.with_format("torch"), count_tokens(blocks) / num_bytes


class StreamedBlocks(torch.utils.data.IterableDataset):
    """Blocks of a streamed data set, made while they are read. Items are those of `make_blocks`."""

    def __init__(
        self,
        documents: IterableDataset,
        columns: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        block_length: int,
        packing: bool,
    ):
        self.documents, self.columns, self.tokenizer = documents, columns, tokenizer
        self.block_length, self.packing = block_length, packing
        self.num_documents = self.num_tokens = self.num_bytes = 0  # read so far in the iteration under way

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        blocks = pack_blocks(self._tokens(), self.block_length) if self.packing else self._whole()
        for block in blocks:
            yield {name: torch.as_tensor(value).long() for name, value in block.items()}

    def _rows(self) -> Iterator[tuple[np.ndarray, int]]:
        self.num_documents = self.num_tokens = self.num_bytes = 0
        for document in self.documents:
            batch = {name: [document[name]] for name in self.columns}
            self.num_documents += 1
            self.num_bytes += sum(len((document[name] or "").encode()) for name in self.columns)
            tokenized = tokenize_batch(batch, self.columns, self.tokenizer)
            self.num_tokens += len(tokenized["input_ids"][0])
            yield tokenized["input_ids"][0], tokenized["prompt_length"][0]

    def _tokens(self) -> Iterator[np.ndarray]:
        for tokens, _ in self._rows():
            yield tokens

    def _whole(self) -> Iterator[dict[str, np.ndarray | int]]:
        for index, (tokens, prompt_length) in enumerate(self._rows()):
            if len(tokens) > self.block_length:
                raise ValueError(_too_long(index, len(tokens), self.block_length))
            if len(tokens) > 1:
                yield {"input_ids": tokens, "prompt_length": prompt_length}


def count_tokens(blocks: Dataset) -> int:
    """Counts the tokens of all blocks or documents."""
    lengths = (pc.list_value_length(table["input_ids"]) for table in blocks.with_format("arrow").iter(batch_size=1000))
    return sum(pc.sum(length).as_py() for length in lengths)


def collate(blocks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads short blocks on the right; labels of padding and of prompts are -100."""
    ids = pad_sequence([block["input_ids"] for block in blocks], batch_first=True, padding_value=-100)
    prompt_lengths = torch.stack([block["prompt_length"] for block in blocks])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < prompt_lengths[:, None], -100)
    batch = {"input_ids": ids.clamp(min=0), "labels": labels}
    if (ids == -100).any():
        batch["attention_mask"] = (ids != -100).long()
    return batch

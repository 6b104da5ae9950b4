"""The data of a run: blocks to train on and blocks to evaluate on, from documents that are loaded or streamed."""

from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from titans_hf.cli.training.arguments import DataArguments
from titans_hf.cli.training.blocks import StreamedBlocks, make_blocks
from titans_hf.cli.training.documents import check_files, load_splits, text_columns

SHUFFLED_DOCUMENTS = 1000  # of a stream, from which the next one is drawn
STREAMED_EVAL_BLOCKS = 100


class Blocks(NamedTuple):
    """The blocks of a run, and the tokens per byte of the text that evaluation blocks come from, without prompts."""

    train: Dataset | StreamedBlocks
    evaluation: Dataset
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
    blocks = _load(args, tokenizer, train_splits, eval_splits)
    if args.max_eval_blocks and args.max_eval_blocks < len(blocks.evaluation):
        spread = np.linspace(0, len(blocks.evaluation) - 1, args.max_eval_blocks, dtype=int)
        blocks = blocks._replace(evaluation=blocks.evaluation.select(spread))
    return blocks


def _load(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    train_splits: Mapping[str, Dataset],
    eval_splits: Mapping[str, Dataset],
) -> Blocks:
    blocks_of = partial(
        make_blocks,
        column=args.text_column,
        tokenizer=tokenizer,
        block_length=args.block_length,
        packing=args.packing,
        num_workers=args.preprocessing_num_workers,
    )
    train_blocks, tokens_per_byte = blocks_of(train_splits["train"])
    if "validation" in eval_splits:
        return Blocks(train_blocks, *blocks_of(eval_splits["validation"]))
    held_out = max(1, round(args.eval_fraction * len(train_blocks)))
    start = len(train_blocks) - held_out
    if start < 1:
        raise ValueError(f"too little text to hold out {held_out} of {len(train_blocks)} blocks: give --eval_data")
    evaluation = train_blocks.select(range(start, len(train_blocks)))
    return Blocks(train_blocks.select(range(start)), evaluation, tokens_per_byte)


def check_all_files(args: DataArguments) -> None:
    """Raises ValueError, which names the file, for a damaged file of the data."""
    check_files(Path(args.train_data), "--train_data")
    if args.eval_data:
        check_files(Path(args.eval_data), "--eval_data")


def _stream(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    train: IterableDataset,
    validation: IterableDataset | None,
    seed: int,
) -> Blocks:
    find_damage = partial(check_all_files, args)

    def blocks_of(documents: IterableDataset) -> StreamedBlocks:
        columns = text_columns(documents, args.text_column, args.packing, find_damage)
        return StreamedBlocks(documents, columns, tokenizer, args.block_length, args.packing, find_damage)

    evaluated = blocks_of(train if validation is None else validation)
    blocks = list(islice(evaluated, args.max_eval_blocks or STREAMED_EVAL_BLOCKS))
    if not blocks:
        raise ValueError("the data holds no text")
    rows = {name: [block[name].tolist() for block in blocks] for name in blocks[0]}
    # All tokens that were made of the bytes read, also those after the last block.
    num_tokens = evaluated.num_tokens
    if validation is None:
        train = train.skip(evaluated.num_documents)
        if next(iter(blocks_of(train)), None) is None:
            raise ValueError(
                f"--train_data {args.train_data} has no text beside the {len(blocks)} blocks that are held out: give "
                "--eval_data or a smaller --max_eval_blocks"
            )
    train = train.shuffle(seed=seed, buffer_size=SHUFFLED_DOCUMENTS)
    evaluation = Dataset.from_dict(rows).with_format("torch")
    return Blocks(blocks_of(train), evaluation, num_tokens / evaluated.num_bytes)

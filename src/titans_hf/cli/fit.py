"""Fits a memory to texts for any causal language model: no weight of the model is trained."""

import argparse
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from titans_hf import save_adapter
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.checkpoints import load_config, load_model, load_tokenizer
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.devices import choose_device
from titans_hf.cli.shared.text_files import find_files, read_text
from titans_hf.cli.shared.text_ids import encode
from titans_hf.remember.fit import Gains, fit_memory
from titans_hf_console import parse as parse_options

LETTERS_AT_ONCE = 2_000_000  # that are tokenized


def cut_texts(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, length: int, number: int, seed: int = 0
) -> list[Tensor]:
    """Returns parts of at most `length` ids (T,) each, `number` ids in all if the files have as many.

    In every round each file gives one part. The order of files, and of each file's parts, is random.
    """
    choose, order, parts, left = random.Random(seed), list(files), [], number
    choose.shuffle(order)
    sources = [parts_of(file, tokenizer, length, choose) for file in order]
    while sources and left > 1:
        for source in list(sources):
            part = next(source, None)
            if part is None:
                sources.remove(source)
            elif left > 1 and len(part) > 1:
                parts.append(part[:left])
                left -= len(part)
    return parts


def parts_of(file: Path, tokenizer: PreTrainedTokenizerBase, length: int, choose: random.Random) -> Iterator[Tensor]:
    """Yields the parts of a file in random order; parts shorter than `length` come last in their block."""
    text = read_text(file, "--text")
    blocks = [text[begin : begin + LETTERS_AT_ONCE] for begin in range(0, len(text), LETTERS_AT_ONCE)]
    for block in choose.sample(blocks, len(blocks)):
        parts = list(torch.tensor(encode(tokenizer, block).input_ids, dtype=torch.int64).split(length))
        yield from sorted(choose.sample(parts, len(parts)), key=lambda x: len(x) < length)


def describe(gains: Gains) -> str:
    """Describes the mean gain in nats per token."""
    before, after = (float(torch.cat(x).mean()) for x in gains[1:])
    return f"loss {before:.3f}, then {after:.3f}: gain {before - after:+.3f}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    args = parse_options("fit", argv)
    check_minimums(args, tokens=2, length=2, window=2, rank=1, entries=1)
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists: give the name of a new folder")
    check_folder(args.output, "--output")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    files = [file for path in args.text for file in find_files(path, "--text")]
    kind, device = load_config(args.model, "MODEL").model_type, choose_device(args.device)
    if kind == "remember":
        raise ValueError(f"MODEL {args.model} is an adapter: give the name of its base model")
    if args.window is None and kind != "titans":
        args.window = 1024
    tokenizer = load_tokenizer(args.model, "MODEL")
    documents = cut_texts(files, tokenizer, args.length, args.tokens, args.seed)
    if not documents:
        raise ValueError(f"--text {' '.join(args.text)} holds no text")
    model = load_model(args.model, "MODEL", dtype="auto").to(device).eval().requires_grad_(False)
    number = sum(map(len, documents))
    print(f"{number:,} tokens of text in {len(documents)} parts of {len(files)} files")
    if number < args.tokens:
        print(f"note: --text has fewer than the {args.tokens:,} tokens of --tokens")
    state = args.output.parent / f".{args.output.name}.fit"
    options = {name: getattr(args, name) for name in ("window", "rank", "entries", "seed")}
    of_fast_weights, of_list = fit_memory(model, documents, folder=state, **options)
    print(f"fast weights over the window alone: {describe(of_fast_weights)}")
    if of_list is not None:
        print(f"list over these: {describe(of_list)}")
    print("measured on the texts of the fit themselves")
    names = sorted({file.name for file in files})
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} others" if len(names) > 20 else "")
    facts = {
        "texts": shown,
        "tokens": number,
        "seed": args.seed,
        "rate": next(iter(model.memory.fast_weights.rates.values())),
    }
    new = state / args.output.name  # renamed when it is whole: an interrupted command goes on by its state
    save_adapter(model, new, fit=facts, licence=args.licence, tokenizer=tokenizer)
    new.rename(args.output)
    shutil.rmtree(state)
    print(args.output)


if __name__ == "__main__":
    run_command(main)

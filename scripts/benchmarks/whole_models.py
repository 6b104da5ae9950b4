"""Whole models of equal size: tokens per second and peak memory of a forward pass and of training, by length."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from . import model_shapes
from .measure import Pass, peak_bytes, seconds
from .table_and_plot import Plot

PLOT = Plot(
    "Whole models of equal size, one text at a time",
    line=("model",),
    x="tokens",
    y={
        "read tokens/s": "reading (tokens per second)",
        "train tokens/s": "training (tokens per second)",
        "train peak KB/token": "peak memory of training (KB per token)",
    },
)
FIXED = (*model_shapes.FIXED, "memory_depth")  # set by --depths
WITHOUT_MEMORY = "without memory"  # Mistral with the MLP of MAG, MAC and MAL
WITHOUT_CACHE = "gated-deltanet"  # a Qwen3-Next without attention, of which transformers cannot keep a cache
NAMES = (*model_shapes.NAMES, WITHOUT_MEMORY)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--size", choices=model_shapes.SIZES, default="tiny")
    parser.add_argument("--models", nargs="+", choices=(*NAMES, WITHOUT_CACHE), default=list(NAMES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 8192, 32768])
    parser.add_argument(
        "--depths", type=int, nargs="+", help="layers of the memory network; by default as its form has"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    model_shapes.add_settings(parser)


class NamedConfig(NamedTuple):
    """A model by its name, the depth of its memory (0 without one, None for its form's) and its configuration."""

    name: str
    depth: int | None
    config: PreTrainedConfig


def run(args: Namespace) -> Iterator[dict]:
    """Checks and times every model at every length; yields a row of each, in which what needs too much memory of a GPU
    is None.
    """
    for name, depth, config in tqdm(list(_configs(args)), desc="models"):
        model = model_shapes.build(config, args.device, getattr(torch, args.dtype))
        if name != WITHOUT_CACHE:
            model_shapes.check(model)
        for length in args.lengths:
            read, train = make_passes(model, length)
            row = {"model": f"{name}, depth {depth}" if len(args.depths or ()) > 1 else name, "tokens": length}
            row["parameters"] = model.num_parameters()
            for what, passes in (("read", read), ("train", train)):
                least = unless_out_of_memory(partial(least_seconds, passes, args))
                row[f"{what} tokens/s"] = least and length / least
            peak = unless_out_of_memory(partial(peak_bytes, train, args.device))
            row["train peak KB/token"] = peak and peak / 1e3 / length
            model.zero_grad()  # what a backward without enough memory has left
            yield row


def least_seconds(run: Pass, args: Namespace) -> float:
    """Measures the least of several times of `run`, after a first that does not count."""
    run()
    return min(seconds(run, args.device) for _ in range(args.repeats))


def unless_out_of_memory(measure: Callable[[], float]) -> float | None:
    """Returns what `measure` does; None where the GPU has too little memory for it."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def _configs(args: Namespace) -> Iterator[NamedConfig]:
    for name in args.models:
        if name == WITHOUT_MEMORY:
            mag = model_shapes.fit_config("mag", args.size)
            config = model_shapes.make_config("mistral", args.size, mag.intermediate_size)
            yield NamedConfig(name, 0, config)
        else:
            titans = name in model_shapes.TITANS
            depths = args.depths or [None]
            for depth in depths if titans else depths[:1]:
                more = {"memory_depth": depth} if titans else {}
                more |= model_shapes.settings_of(name, args.size, args.set, FIXED)
                yield NamedConfig(name, depth, model_shapes.fit_config(name, args.size, **more))


def make_passes(model: PreTrainedModel, length: int) -> tuple[Pass, Pass]:
    """Makes a function that reads `length` tokens without gradients, and another that computes the loss's gradients."""
    ids = model_shapes.draw_tokens(model, length)

    def read() -> None:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)

    def train() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return read, train

"""Whole models of equal size: tokens per second and peak memory of a forward pass and of training, by length."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator

import torch
from tqdm import tqdm
from transformers import PreTrainedConfig

from . import comparable_models
from .measure import peak_bytes, seconds
from .table_and_plot import Plot

PLOT = Plot("Whole models", line=("model",), x="tokens", y=("read tokens/s", "train tokens/s", "train peak KB/token"))
WITHOUT_MEMORY = "without memory"  # Mistral with the MLP of MAG, MAC and MAL


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--size", choices=comparable_models.SHAPES, default="tiny")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=(*comparable_models.NAMES, WITHOUT_MEMORY),
        default=[*comparable_models.NAMES, WITHOUT_MEMORY],
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 8192, 32768])
    parser.add_argument("--depths", type=int, nargs="+", default=[1], help="layers of the memory network")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")


def run(args: Namespace) -> Iterator[dict]:
    for name, depth, config in tqdm(list(_configs(args)), desc="models"):
        model = comparable_models.build(config, args.device, getattr(torch, args.dtype))
        comparable_models.check(model)
        for length in args.lengths:
            read, train = work(model, length)
            row = {"model": f"{name}, depth {depth}" if len(args.depths) > 1 else name, "tokens": length}
            row["parameters"] = model.num_parameters()
            for what, passes in (("read", read), ("train", train)):
                passes()
                row[f"{what} tokens/s"] = length / min(seconds(passes, args.device) for _ in range(args.repeats))
            row["train peak KB/token"] = peak_bytes(train, args.device) / 1e3 / length
            yield row


def _configs(args: Namespace) -> Iterator[tuple[str, int, PreTrainedConfig]]:
    for name in args.models:
        if name == WITHOUT_MEMORY:
            mag = comparable_models.fitting_config("mag", args.size)
            yield name, 0, comparable_models.make_config("mistral", args.size, mag.intermediate_size)
        else:
            titans = name in comparable_models.TITANS
            for depth in args.depths if titans else args.depths[:1]:
                more = {"memory_depth": depth} if titans else {}
                yield name, depth, comparable_models.fitting_config(name, args.size, **more)


def work(model, length: int) -> tuple[Callable, Callable]:
    ids = comparable_models.draw_tokens(model, length)

    def read() -> None:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)

    def train() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return read, train

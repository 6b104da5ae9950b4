"""A very long prompt, read in pieces: tokens per second and resident memory, from its beginning to its end."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from . import zoo
from .measure import resident_bytes, seconds
from .report import Plot

PLOT = Plot(line=("model",), x="tokens", y=("tokens/s", "resident MB"))


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, help="folder of .txt files, read as bytes, over and over")
    parser.add_argument("--models", nargs="+", choices=zoo.VARIANTS, default=["mag"])
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--piece", type=int, default=4096, help="tokens read at once")
    parser.add_argument("--every", type=int, default=100_000, help="tokens between two rows")


@torch.no_grad()
def run(args: Namespace) -> Iterator[dict]:
    files = sorted(args.text.glob("*.txt"))
    if not files:
        raise SystemExit(f"error: --text {args.text} holds no .txt files")
    for name in args.models:
        model = zoo.build(zoo.fitting_config(name, "tiny"), args.device, torch.float32)
        zoo.check(model)
        reader = Reader(model)
        with tqdm(total=args.tokens, desc=name, unit=" tokens", unit_scale=True) as bar:
            spent, measured = 0.0, 0  # seconds since the last row; tokens up to it
            for ids in _pieces(files, args.piece, args.tokens):
                spent += seconds(partial(reader.read, ids), args.device)
                bar.update(ids.shape[1])
                if reader.num_read >= min(measured + args.every, args.tokens):
                    speed = (reader.num_read - measured) / spent
                    measured, spent = reader.num_read, 0.0
                    yield {
                        "model": name,
                        "tokens": measured,
                        "tokens/s": speed,
                        "resident MB": resident_bytes() / 1e6,
                    }


class Reader:
    """A model and the cache of what it has read."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.cache = None
        self.num_read = 0

    def read(self, ids: torch.Tensor) -> None:
        ids = ids.to(self.model.device)
        output = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = output.past_key_values
        self.num_read += ids.shape[1]


def _pieces(files: list[Path], size: int, total: int) -> Iterator[torch.Tensor]:
    left, rest = total, b""
    for file in cycle(files):
        text = rest + file.read_bytes()
        while len(text) >= min(size, left):
            piece, text = text[: min(size, left)], text[min(size, left) :]
            left -= len(piece)
            yield torch.tensor(list(piece))[None] + 3
            if not left:
                return
        rest = text

"""A very long prompt, read in pieces: tokens per second and resident memory along it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from titans_hf.cli.shared.text_files import find_files

from . import model_shapes
from .measure import resident_bytes, seconds
from .table_and_plot import Plot

PLOT = Plot(
    "Reading one long prompt",
    line=("model",),
    x="tokens",
    y={"tokens/s": "tokens per second", "resident MB": "resident memory (MB)"},
    xscale="linear",
    xlabel="tokens read",
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, help="folder of .txt files, read as bytes, over and over")
    parser.add_argument("--models", nargs="+", choices=model_shapes.VARIANTS, default=["mag"])
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--piece", type=int, default=4096, help="tokens read at once")
    parser.add_argument("--every", type=int, default=100_000, help="tokens between two rows")
    model_shapes.add_settings(parser)


@torch.no_grad()
def run(args: Namespace) -> Iterator[dict]:
    """Checks every model and lets it read the prompt; yields a row every `--every` tokens and at the end.

    Raises ValueError for a folder without texts.
    """
    files = find_files(args.text, "--text")
    for name in args.models:
        config = model_shapes.fit_config(name, "tiny", **model_shapes.settings_of(name, "tiny", args.set))
        model = model_shapes.build(config, args.device, torch.float32)
        model_shapes.check(model)
        reader = Reader(model)
        with tqdm(total=args.tokens, desc=name, unit=" tokens", unit_scale=True) as bar:
            spent, measured = 0.0, 0  # seconds since the last row; tokens up to it
            for ids in _pieces(files, args.piece, args.tokens):
                spent += seconds(partial(reader.read, ids), args.device)
                bar.update(ids.shape[1])
                if reader.num_tokens >= min(measured + args.every, args.tokens):
                    speed = (reader.num_tokens - measured) / spent
                    measured, spent = reader.num_tokens, 0.0
                    yield {
                        "model": name,
                        "tokens": measured,
                        "tokens/s": speed,
                        "resident MB": resident_bytes() / 1e6,
                    }


class Reader:
    """A model and its cache."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.given = {}
        self.num_tokens = 0

    def read(self, ids: torch.Tensor) -> None:
        ids = ids.to(self.model.device)
        output = self.model(ids, use_cache=True, logits_to_keep=1, **self.given)
        self.given = model_shapes.of_cache(output)
        self.num_tokens += ids.shape[1]


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

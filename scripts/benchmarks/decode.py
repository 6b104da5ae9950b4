"""One decoding step: time and size of the cache by the length of the context.

Titans reads all of the context. The others read its first 256 tokens; layers with full attention get these keys and
values repeated up to the length, because the cost of a step depends on their number alone.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from statistics import median

import torch
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from . import model_shapes
from .measure import seconds
from .table_and_plot import Plot

PLOT = Plot(
    "One more token after a text",
    line=("model",),
    x="context",
    y={"ms/token": "time of the token (ms)", "cache MB": "cache (MB)"},
    yscale="log",
)
NUM_READ_TOKENS = 256
TOKENS_PER_CALL = 4096


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--size", choices=model_shapes.SIZES, default="30m")
    parser.add_argument("--models", nargs="+", choices=model_shapes.NAMES, default=list(model_shapes.NAMES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 16384, 65536])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true", help="compile the models by torch.compile")
    model_shapes.add_settings(parser)


@torch.no_grad()
def run(args: Namespace) -> Iterator[dict]:
    """Checks every model and times its steps after each context; yields a row of each."""
    for name in tqdm(args.models, desc="decode"):
        config = model_shapes.fit_config(name, args.size, **model_shapes.settings_of(name, args.size, args.set))
        model = model_shapes.build(config, args.device, getattr(torch, args.dtype))
        model_shapes.check(model)
        readers = {context: Reader(model, context) for context in args.contexts}
        if args.compile:
            model.compile()
        sizes = {context: num_bytes(reader.cache) for context, reader in readers.items()}
        # All contexts in turn, so that other processes slow each of them equally.
        rounds = [[seconds(reader.step, args.device) for reader in readers.values()] for _ in range(args.steps + 3)][3:]
        for i, context in enumerate(args.contexts):
            yield {
                "model": name,
                "context": context,
                "ms/token": 1e3 * median(times[i] for times in rounds),
                "of the first": median(times[i] / times[0] for times in rounds),
                "cache MB": sizes[context] / 1e6,
            }


class Reader:
    """A model with the cache of `context` tokens."""

    def __init__(self, model: PreTrainedModel, context: int):
        self.model = model
        titans = model.config.model_type == "titans"
        ids = model_shapes.draw_tokens(model, context if titans else min(context, NUM_READ_TOKENS))
        self.given = {}
        for piece in ids.split(TOKENS_PER_CALL, dim=1):
            output = model(piece, use_cache=True, logits_to_keep=1, **self.given)
            self.given = model_shapes.of_cache(output)
        (self.cache,) = self.given.values()
        self.token = ids[:, -1:]
        if not titans:
            for layer in self.cache.layers:
                if isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer):
                    columns = torch.arange(context, device=layer.keys.device) % ids.shape[1]
                    layer.keys, layer.values = layer.keys[:, :, columns], layer.values[:, :, columns]

    def step(self) -> None:
        self.model(self.token, use_cache=True, **self.given)


def num_bytes(held: object) -> int:
    """Counts the bytes of all tensors that a cache holds."""
    if isinstance(held, torch.Tensor):
        return held.numel() * held.element_size()
    if isinstance(held, dict):
        held = list(held.values())
    if isinstance(held, (list, tuple)):
        return sum(map(num_bytes, held))
    return num_bytes(vars(held)) if type(held).__module__.startswith(("transformers", "titans_hf")) else 0

"""Small models of time series for tests, values for them, and reading these in pieces."""

import torch
from common import redraw

from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig

SIZES = dict(
    context_length=20,
    patch_length=4,
    prediction_length=10,
    hidden_size=16,
    intermediate_size=24,
    sliding_window=4,
    segment_length=4,
    memory_chunk_size=2,
)
CYCLE = dict(cycle_length=7, num_input_channels=3)
POSITION = torch.tensor([3, 12])  # of the first values of two series in the cycle


def make_model(variant: str = "lmm", dtype=torch.float64, **changes) -> TitansForTimeSeriesPrediction:
    config = TitansTimeSeriesConfig(**{**SIZES, "variant": variant, **changes})
    return redraw(TitansForTimeSeriesPrediction(config).to(dtype).eval())


def make_values(series: int = 2, length: int = 60, channels: int = 3, seed: int = 0, dtype=torch.float64):
    """Random walks (series, length, channels): their mean and deviation change from patch to patch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(series, length, channels, generator=generator, dtype=torch.float64).cumsum(1).to(dtype)


@torch.no_grad()
def read(model, values, sizes, **first):
    """Returns the output after each piece of the given sizes; `first` are further arguments of the first call."""
    outputs, state = [], None
    for piece in values.split(sizes, dim=1):
        outputs.append(model(past_values=piece, state=state, use_cache=True, **({} if outputs else first)))
        state = outputs[-1].state
    return outputs


def repeat_cycle(model, length: int) -> torch.Tensor:
    """Returns the model's cycle (2, length, channels) from POSITION on, value by value."""
    weight = model.cycle.weight.detach()
    return torch.stack([torch.stack([weight[(p + t) % len(weight)] for t in range(length)]) for p in POSITION.tolist()])

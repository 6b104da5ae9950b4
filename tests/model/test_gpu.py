"""On a GPU, by graphs and by fla's kernel: training, generation, memory files, and tokens/s. `make test-gpu`"""

import importlib.util

import pytest
import torch
from common import VARIANTS, left_pad, make_ids, make_model, redraw, tensors
from covering import covering

from scripts.measure import least_seconds
from titans_hf import TitansCache, memory_graphs

DEVICE = "cuda"
IS_MISSING = not torch.cuda.is_available() or importlib.util.find_spec("fla") is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(IS_MISSING, reason="no CUDA GPU, or no fla: make test-gpu")]
# Largest error that a kernel adds to PyTorch's error in the same dtype, as a share of the result's norm: an estimate.
# In float32 the kernel may multiply in TF32, numbers of 10 bits.
ALLOWED = {torch.float32: 1e-2, torch.bfloat16: 5e-2}


def make(way: str, variant: str, kernel: str, dtype: torch.dtype):
    """Makes a model with the same weights in every dtype, with heads of the memory as large as common. Of larger random
    weights, MAC would make rounding errors grow a thousandfold."""
    sizes = dict(hidden_size=128, memory_num_heads=2, segment_length=64, memory_chunk_size=64, sliding_window=64)
    form = dict(memory_form="delta" if way == "fla" else "titans", memory_kernel=kernel)
    return redraw(make_model(variant, **sizes, **form), scale=0.05).to(DEVICE, dtype)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and mask of two rows, longer and shorter than two chunks."""
    ids, mask = left_pad([make_ids(150), make_ids(101, seed=1)])
    return ids.to(DEVICE), mask.to(DEVICE)


def compare(way: str, run, dtype: torch.dtype) -> None:
    """Asserts that a way is hardly farther from float64 than PyTorch; `run` returns results, a step and its tokens."""
    kinds = ("fla" if way == "fla" else "auto", dtype), ("torch", dtype), ("torch", torch.float64)
    runs, steps, numbers = zip(*(run(*kind) for kind in kinds), strict=True)
    rates = [number / least_seconds(step, torch.device(DEVICE), 3) for step, number in zip(steps, numbers, strict=True)]
    for results in zip(*runs, strict=True):
        parts = [torch.cat([x.double().flatten() for x in values]) for values in results]
        errors = [((x - parts[2]).norm() / parts[2].norm()).item() for x in parts]
        shown = [f"{error:.1e}, {rate:.0f} tokens/s" for error, rate in zip(errors, rates, strict=True)]
        print("{} {}; PyTorch {}; float64 {}".format(f"{way}, {dtype}:", *shown))
        assert errors[0] < 2 * errors[1] + ALLOWED[dtype]


@covering(2, {"way": ["groups as graphs", "step as a graph", "fla"], "variant": VARIANTS, "dtype": ALLOWED})
def test_a_training_step(way, variant, dtype, monkeypatch):
    """The loss and all gradients are those of the model in float64, but for a whole step as a graph with padding."""
    monkeypatch.setattr(memory_graphs, "RECORDED_CALL", 1)
    ids, mask = texts()
    given = {} if way == "step as a graph" else dict(attention_mask=mask)

    def make_step(kernel: str, dtype: torch.dtype) -> tuple:
        model = make(way, variant, kernel, dtype)

        def step() -> tuple:
            model.zero_grad()
            loss = model(ids, labels=ids.masked_fill(mask == 0, -100), use_cache=False, **given).loss
            loss.backward()
            return [loss.detach()], [x.grad for x in model.parameters() if x.grad is not None]

        if given or kernel == "torch":
            return step(), step, ids.numel()
        recording = memory_graphs.CudaRecording(step, ids.device)
        recording.replay()
        return recording.results, recording.replay, ids.numel()

    compare(way, make_step, dtype)


@covering(2, {"way": ["token as a graph", "groups as graphs", "fla"], "variant": VARIANTS, "dtype": ALLOWED})
def test_generation_and_memory_files(way, variant, dtype, tmp_path, monkeypatch):
    """A prompt in two calls, decoding, and the memory saved and loaded give the logits of the model in float64."""
    monkeypatch.setattr(memory_graphs, "RECORDED_CALL", 1)
    ids, mask = texts()

    @torch.no_grad()
    def read(kernel: str, dtype: torch.dtype) -> tuple:
        model = make(way, variant, kernel, dtype)
        cache = model(ids[:, :70], attention_mask=mask[:, :70], use_cache=True).cache
        found = [model(ids[:, 70:140], attention_mask=mask[:, 70:140], cache=cache).logits]
        folder = tmp_path / f"{kernel}-{dtype}"
        cache.save_pretrained(folder, model)
        loaded = TitansCache.from_pretrained(folder, model)
        assert all(torch.equal(a, b) for a, b in zip(tensors(cache), tensors(loaded), strict=True))

        @torch.no_grad()
        def step(token: torch.Tensor, states: list) -> tuple:
            for layer, state in zip(loaded.layers, states, strict=True):
                layer.state = state
            return model(token, cache=loaded).logits, [layer.state for layer in loaded.layers]

        if way == "token as a graph" and kernel == "auto":
            step = memory_graphs.Recorded(step, 2)
        states = [layer.state for layer in loaded.layers]
        for token in ids[:, 140:].split(1, dim=1):
            logits, states = step(token, states)
            found.append(logits)
        return [[torch.cat(found, dim=1)[mask[:, 70:] == 1]]], lambda: step(token, states), len(ids)

    compare(way, read, dtype)

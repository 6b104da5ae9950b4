"""On a GPU, by graphs and by fla's kernel: training, generation and memory files. `make test-gpu`"""

import importlib.util

import pytest
import torch
from common import VARIANTS, gradients, left_pad, make_ids, make_model, redraw, tensors
from covering import covering

from titans_hf import TitansCache, memory_graphs

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla is not installed: make test-gpu"),
]
# Largest error that a kernel adds to PyTorch's error in the same dtype, as a share of the result's norm: an estimate.
# In float32 the kernel may multiply in TF32, numbers of 10 bits.
ALLOWED = {torch.float32: 1e-2, torch.bfloat16: 5e-2}


def make(variant: str, dtype: torch.dtype, **changes):
    """Makes a model with the same weights in every dtype, with heads of the memory as large as common. Of larger random
    weights, MAC would make rounding errors grow a thousandfold."""
    sizes = dict(hidden_size=128, memory_num_heads=2, segment_length=64, memory_chunk_size=64, sliding_window=64)
    model = make_model(variant, **{**sizes, **changes})
    return redraw(model, scale=0.05).to(DEVICE, dtype)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and mask of two rows, longer and shorter than two chunks."""
    ids, mask = left_pad([make_ids(150), make_ids(101, seed=1)])
    return ids.to(DEVICE), mask.to(DEVICE)


def joined(values) -> torch.Tensor:
    return torch.cat([x.detach().double().flatten().cpu() for x in values])


def assert_as_good_as_pytorch(kernel, pytorch, exact, dtype: torch.dtype) -> None:
    """Asserts that the kernel is hardly farther from the results in float64 than PyTorch in the same dtype."""
    exact = joined(exact)
    errors = [((joined(x) - exact).norm() / exact.norm()).item() for x in (kernel, pytorch)]
    print(f"{dtype}: kernel {errors[0]:.1e}, PyTorch {errors[1]:.1e}")
    assert errors[0] < 2 * errors[1] + ALLOWED[dtype]


@covering(2, {"way": ["groups as graphs", "step as a graph", "fla"], "variant": VARIANTS, "dtype": ALLOWED})
def test_a_training_step(way, variant, dtype, monkeypatch):
    """The loss and all gradients are those of the model in float64, but for a whole step as a graph with padding."""
    monkeypatch.setattr(memory_graphs, "RECORDED_CALL", 1)
    (ids, mask), kernel = texts(), "fla" if way == "fla" else "auto"

    def step(kernel: str, dtype: torch.dtype) -> tuple:
        model = make(variant, dtype, memory_form="delta" if way == "fla" else "titans", memory_kernel=kernel)
        given = {} if way == "step as a graph" else dict(attention_mask=mask)
        labels = ids.masked_fill(mask == 0, -100)

        def run() -> torch.Tensor:
            model.zero_grad()
            loss = model(ids, labels=labels, use_cache=False, **given).loss
            loss.backward()
            return loss.detach()

        if given or kernel == "torch":
            loss = run()
        else:
            recording = memory_graphs.CudaRecording(run, ids.device)
            recording.replay()
            loss = recording.results
        return [loss], [x for x in gradients(model).values() if x is not None]

    runs = [step(kernel, dtype), step("torch", dtype), step("torch", torch.float64)]
    for results in zip(*runs, strict=True):
        assert_as_good_as_pytorch(*results, dtype)


@covering(1, {"variant": VARIANTS, "dtype": ALLOWED})
def test_generation_and_memory_files(variant, dtype, tmp_path):
    """A prompt in two calls, decoding, and the memory saved and loaded give the logits of the model in float64."""
    ids, mask = texts()

    @torch.no_grad()
    def logits(kernel: str, dtype: torch.dtype) -> list[torch.Tensor]:
        model = make(variant, dtype, memory_form="delta", memory_kernel=kernel)
        cache = model(ids[:, :70], attention_mask=mask[:, :70], use_cache=True).cache
        prefill = model(ids[:, 70:140], attention_mask=mask[:, 70:140], cache=cache).logits
        folder = tmp_path / f"{kernel}-{dtype}"
        cache.save_pretrained(folder, model)
        loaded = TitansCache.from_pretrained(folder, model)
        assert all(torch.equal(a, b) for a, b in zip(tensors(cache), tensors(loaded), strict=True))
        steps = [model(column, cache=loaded).logits for column in ids[:, 140:].split(1, dim=1)]
        return [torch.cat([prefill, *steps], dim=1)[mask[:, 70:] == 1]]

    runs = [logits("fla", dtype), logits("torch", dtype), logits("torch", torch.float64)]
    assert_as_good_as_pytorch(*runs, dtype)

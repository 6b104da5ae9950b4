"""On a GPU, by PyTorch and by fla's kernels: training, generation, memory files, and tokens/s. `make test-gpu`"""

import importlib.util

import pytest
import torch
from common import VARIANTS, left_pad, make_ids, make_model, redraw, tensors
from covering import covering

from scripts.measure import least_seconds
from titans_hf import TitansCache

DEVICE = "cuda"
IS_MISSING = not torch.cuda.is_available() or importlib.util.find_spec("fla") is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(IS_MISSING, reason="no CUDA GPU, or no fla: make test-gpu")]
# Largest error that a kernel adds to PyTorch's error in the same dtype, as a share of the result's norm: an estimate.
# In float32 the kernel may multiply in TF32, numbers of 10 bits.
ALLOWED = {torch.float32: 1e-2, torch.bfloat16: 5e-2}
FORMS = ("titans", "delta", "paper")


def make(form: str, variant: str, kernel: str, dtype: torch.dtype):
    """Makes a model with the same weights in every dtype, with heads of the memory as large as common. Of larger random
    weights, MAC would make rounding errors grow a thousandfold."""
    sizes = dict(hidden_size=128, memory_num_heads=2, segment_length=64, memory_chunk_size=64, sliding_window=64)
    model = make_model(variant, **sizes, memory_form=form, memory_kernel=kernel)
    return redraw(model, scale=0.05).to(DEVICE, dtype)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and mask of two rows, longer and shorter than two chunks."""
    ids, mask = left_pad([make_ids(150), make_ids(101, seed=1)])
    return ids.to(DEVICE), mask.to(DEVICE)


def compare(form: str, run, dtype: torch.dtype) -> None:
    """Asserts that "auto" is hardly farther from float64 than PyTorch; `run` returns results, a step and its tokens."""
    kinds = ("auto", dtype), ("torch", dtype), ("torch", torch.float64)
    runs, steps, numbers = zip(*(run(*kind) for kind in kinds), strict=True)
    rates = [number / least_seconds(step, torch.device(DEVICE), 3) for step, number in zip(steps, numbers, strict=True)]
    for results in zip(*runs, strict=True):
        parts = [torch.cat([x.double().flatten() for x in values]) for values in results]
        errors = [((x - parts[2]).norm() / parts[2].norm()).item() for x in parts]
        shown = [f"{error:.1e}, {rate:.0f} tokens/s" for error, rate in zip(errors, rates, strict=True)]
        print("{} {}; PyTorch {}; float64 {}".format(f"{form}, {dtype}:", *shown))
        assert errors[0] < 2 * errors[1] + ALLOWED[dtype]


@covering(2, {"form": FORMS, "variant": VARIANTS, "dtype": ALLOWED})
def test_a_training_step(form, variant, dtype):
    """The loss and all gradients are those of the model in float64, with padding."""
    ids, mask = texts()

    def make_step(kernel: str, dtype: torch.dtype) -> tuple:
        model = make(form, variant, kernel, dtype)

        def step() -> tuple:
            model.zero_grad()
            labels = ids.masked_fill(mask == 0, -100)
            loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
            loss.backward()
            return [loss.detach()], [x.grad for x in model.parameters() if x.grad is not None]

        return step(), step, ids.numel()

    compare(form, make_step, dtype)


@covering(2, {"form": FORMS, "variant": VARIANTS, "dtype": ALLOWED})
def test_generation_and_memory_files(form, variant, dtype, tmp_path):
    """A prompt in two calls, decoding, and the memory saved and loaded give the logits of the model in float64."""
    ids, mask = texts()

    @torch.no_grad()
    def read(kernel: str, dtype: torch.dtype) -> tuple:
        model = make(form, variant, kernel, dtype)
        cache = model(ids[:, :70], attention_mask=mask[:, :70], use_cache=True).cache
        found = [model(ids[:, 70:140], attention_mask=mask[:, 70:140], cache=cache).logits]
        folder = tmp_path / f"{kernel}-{dtype}"
        cache.save_pretrained(folder, model)
        loaded = TitansCache.from_pretrained(folder, model)
        assert all(torch.equal(a, b) for a, b in zip(tensors(cache), tensors(loaded), strict=True))

        @torch.no_grad()
        def step(token: torch.Tensor) -> torch.Tensor:
            return model(token, cache=loaded).logits

        found += [step(token) for token in ids[:, 140:].split(1, dim=1)]
        return [[torch.cat(found, dim=1)[mask[:, 70:] == 1]]], lambda: step(ids[:, -1:]), len(ids)

    compare(form, read, dtype)

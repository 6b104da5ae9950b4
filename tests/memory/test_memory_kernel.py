"""The memory's rule by fla's kernels: whole models with stand-ins, when it is chosen, the kernels as published."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import (
    TWO_VARIANTS,
    VARIANTS,
    assert_same,
    assert_same_cache,
    assert_same_gradients,
    full_logits,
    gradients,
    left_pad,
    make_ids,
    make_model,
    read,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from titans_hf import memory_kernels, neural_memory
from titans_hf.memory_kernels import LARGEST_KEY, choose_rule
from titans_hf.token_grid import TokenGrid

WORKER = Path(__file__).parents[1] / "helpers" / "kernel_worker.py"


def gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state):
    """The recurrence of fla's `chunk_gated_delta_rule`, token by token: (B, T, H, ...)."""
    assert scale == 1 and output_final_state and g.min() >= -5
    state, outputs = initial_state, []
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        state = g_t.exp()[..., None, None] * state
        error = v_t - torch.einsum("bhk,bhkv->bhv", k_t, state)
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta_t, k_t, error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_t, state))
    return torch.stack(outputs, 1), state


def dplr_delta_rule(q, k, v, a, b, gk, scale, initial_state, output_final_state, safe_gate):
    """The recurrence of fla's `chunk_dplr_delta_rule`, token by token: (B, T, H, ...)."""
    assert scale == 1 and output_final_state and safe_gate and gk.min() >= -5
    state, outputs = initial_state, []
    for q_t, k_t, v_t, a_t, b_t, g_t in zip(*(x.unbind(1) for x in (q, k, v, a, b, gk)), strict=True):
        read = torch.einsum("bhk,bhkv->bhv", a_t, state)
        written = torch.einsum("bhk,bhv->bhkv", k_t, v_t) + torch.einsum("bhk,bhv->bhkv", b_t, read)
        state = g_t.exp()[..., None] * state + written
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_t, state))
    return torch.stack(outputs, 1), state


@pytest.fixture
def stand_in(monkeypatch):
    """The recurrences as kernels, on the CPU in float64; returns the numbers of tokens that they have read."""
    read = []

    def rule(requested, k, has_momentum, grid, dtype):
        if requested == "torch" or grid.num_slots == 1 or grid.needs_surprise:
            return None
        read.append(grid.num_slots)
        ours = memory_kernels.dplr_delta_rule if has_momentum else memory_kernels.gated_delta_rule
        return lambda *args, **given: ours(dplr_delta_rule if has_momentum else gated_delta_rule, *args, **given)

    monkeypatch.setattr(neural_memory, "choose_rule", rule)
    return read


FORMS = {
    "titans": dict(),
    "delta": dict(memory_form="delta"),
    "nothing forgotten": dict(memory_forget=False),
    "paper's recurrence": dict(memory_recurrence="paper"),
}
CASES = [(variant, form) for variant, form in zip(VARIANTS, FORMS, strict=True)] + [("lmm", "titans"), ("mac", "delta")]


@pytest.mark.parametrize("variant,form", CASES)
def test_padded_rows_and_gradients(variant, form, stand_in):
    """With the kernel, a model has the loss, logits and gradients that it has in PyTorch, with padding in a row."""
    model = make_model(variant, **FORMS[form])
    ids, mask = left_pad([make_ids(31), make_ids(17, seed=1)])
    found = {}
    for kernel in ("torch", "auto"):
        model.zero_grad()
        model.config.memory_kernel = kernel
        output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        found[kernel] = (output.logits[mask == 1], gradients(model))
        assert bool(stand_in) == (kernel == "auto")
    assert_same(found["auto"][0], found["torch"][0], 1e-12)
    assert_same_gradients(found["auto"][1], found["torch"][1], 1e-12)


@pytest.mark.parametrize("variant,form", CASES)
def test_packed_documents_and_states_that_change_hands(variant, form, stand_in):
    """Packed documents and `generate` are those of PyTorch, and either program goes on from the other's state."""
    model, ids = make_model(variant, **FORMS[form]), make_ids(2, 45)
    positions = torch.cat([torch.arange(14), torch.arange(31)])[None]
    found = []
    for kernels in (["torch"] * 4, ["auto"] * 4, ["auto", "torch", "torch", "auto"]):
        model.config.memory_kernel = kernels[0]
        packed, cache, logits = full_logits(model, ids[:1], position_ids=positions), None, []
        for kernel, part in zip(kernels, ids.split([13, 1, 2, 29], 1), strict=True):
            model.config.memory_kernel = kernel
            out, cache = read(model, part, None, cache)
            logits.append(out)
        generated = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        found.append((packed, torch.cat(logits, 1), cache, generated))
    for other in found[1:]:
        assert_same(other[:2], found[0][:2], 1e-12)
        assert_same_cache(other[2], found[0][2], 1e-12)
        assert torch.equal(other[3], found[0][3])
    assert min(stand_in) > 1  # single tokens are PyTorch's


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_surprise_is_computed_by_pytorch(variant, stand_in):
    """A call with `output_surprise` takes no kernel, and has PyTorch's surprise."""
    model, ids = make_model(variant, num_persistent_tokens=0), make_ids(2, 21)
    found = []
    for kernel in ("torch", "auto"):
        model.config.memory_kernel = kernel
        found.append([x.gradient_norm for x in model(ids, output_surprise=True).surprise])
    assert not stand_in
    assert_same(found[1], found[0])


def test_where_a_kernel_is_chosen(monkeypatch):
    """Kernels compute several tokens in float32 on CUDA, with keys that they can hold; nothing else imports them. The
    kernel with momentum is for models in 16 bits.
    """
    monkeypatch.setattr(memory_kernels, "_import_kernel", lambda has_momentum: print)  # stands for the kernel
    grid, one = (TokenGrid.identity(2, n, torch.device("cpu")) for n in (5, 1))

    def choose(
        requested="auto", device="cuda", dtype=torch.float32, size=8, has_momentum=True, grid=grid, of_model=None
    ):
        with FakeTensorMode():
            k = torch.empty(2, 3, 5, size, device=device, dtype=dtype)
        return choose_rule(requested, k, has_momentum, grid, of_model or torch.bfloat16)

    assert choose(has_momentum=False, of_model=torch.float32).func is memory_kernels.gated_delta_rule
    assert choose().func is memory_kernels.dplr_delta_rule and choose(size=LARGEST_KEY // 2) is not None
    monkeypatch.setattr(memory_kernels, "_import_kernel", lambda has_momentum: pytest.fail("imported"))
    assert (
        choose(of_model=torch.float32)
        is choose("torch")
        is choose(device="cpu")
        is choose(dtype=torch.float64)
        is choose(grid=one)
        is None
    )
    assert choose(size=LARGEST_KEY // 2 + 1) is choose(size=LARGEST_KEY + 1, has_momentum=False) is None


def test_without_fla(monkeypatch):
    """Where fla cannot be imported, PyTorch updates the memory."""
    memory_kernels._import_kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)  # what makes its import fail
    assert memory_kernels._import_kernel(False) is None
    memory_kernels._import_kernel.cache_clear()


@pytest.mark.parametrize("program,allowed", [("reference", 1e-5), ("delta", 1e-5), ("titans", 1e-2)])
def test_the_published_kernels(program, allowed):
    """fla's PyTorch reference, and its kernels in Triton's interpreter, have the outputs, state and gradients of the
    token loop in float64. With momentum, the kernel solves its systems in float16: it is off by 4e-3 where keys repeat.
    """
    missing = [name for name in ("fla", "triton", "einops") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make test-kernels")
    done = subprocess.run([sys.executable, WORKER, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < allowed

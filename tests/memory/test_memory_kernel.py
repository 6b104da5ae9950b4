"""The memory's update by fla's kernel: when it is chosen, whole models with a stand-in, and the kernel as published."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
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
from memorize_runs import B, H, make_inputs, make_state, without_momentum
from torch._subclasses.fake_tensor import FakeTensorMode

from titans_hf import MemoryInputs, MemoryState, UpdateRule, memory_ops
from titans_hf.memory_listing import torch_chunk_comba
from titans_hf.memory_ops import SMALLEST_LOG_RETAIN, choose_kernel, memorize_by_kernel
from titans_hf.memory_reference import memorize_reference
from titans_hf.token_grid import TokenGrid

DELTA = UpdateRule(None, delta_rule=True)
WORKER = Path(__file__).parents[1] / "helpers" / "kernel_worker.py"


@pytest.fixture
def stand_in(monkeypatch):
    """The listing as the kernel of every linear memory, on the CPU in float64; returns the queries' shapes."""
    sizes = []

    def chunk_comba(q, k, v, p, g, beta, scale, initial_state, output_final_state):
        assert (g >= SMALLEST_LOG_RETAIN).all() and g.shape == beta.shape == q.shape[:3] and initial_state.dim() == 4
        sizes.append(tuple(q.shape))
        return torch_chunk_comba(q, k, v, p, g, beta, scale, initial_state, output_final_state)

    misfits, own = memory_ops._misfits, ("device", "torch.float32")  # what keeps it from the CPU and from float64
    others = lambda *args: [x for x in misfits(*args) if not any(name in x for name in own)]  # noqa: E731
    monkeypatch.setattr(memory_ops, "_misfits", others)
    monkeypatch.setattr(memory_ops, "_import_chunk_comba", lambda: (chunk_comba, None))
    return sizes


FORMS = {
    "delta": dict(),
    "nothing forgotten": dict(memory_forget=False),
    "paper's recurrence": dict(memory_recurrence="paper"),
    "gates per layer": dict(memory_gates="layer"),
    "hidden layers fixed": dict(memory_depth=2, memory_hidden_step=0.0),
}
CASES = [(variant, "delta") for variant in VARIANTS] + list(zip(VARIANTS, list(FORMS)[1:], strict=False))


@pytest.mark.parametrize("variant,form", CASES)
def test_padded_rows_and_gradients(variant, form, stand_in):
    """With the kernel, a model has the loss, logits and gradients that it has in PyTorch, with padding in a row."""
    model = make_model(variant, memory_form="delta", **FORMS[form])
    ids, mask = left_pad([make_ids(31), make_ids(17, seed=1)])
    found = {}
    for kernel in ("torch", "fla"):
        model.zero_grad()
        model.config.memory_kernel = kernel
        output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        found[kernel] = (output.logits[mask == 1], gradients(model))
        assert bool(stand_in) == (kernel == "fla")
    assert_same(found["fla"][0], found["torch"][0])
    assert_same_gradients(found["fla"][1], found["torch"][1])


@pytest.mark.parametrize("variant,form", CASES[4:])
def test_packed_documents_and_calls_within_a_chunk(variant, form, stand_in):
    """With the kernel, packed documents, calls that start within a chunk and `generate` are those of PyTorch."""
    model, ids = make_model(variant, memory_form="delta", **FORMS[form]), make_ids(2, 45)
    positions = torch.cat([torch.arange(14), torch.arange(31)])[None]
    found = []
    for kernel in ("torch", "fla"):
        model.config.memory_kernel = kernel
        packed = full_logits(model, ids[:1], position_ids=positions)
        logits, cache = read(model, ids, [13, 1, 2, 29])
        generated = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        found.append((packed, logits, cache, generated))
    assert_same(found[1][:2], found[0][:2])
    assert_same_cache(found[1][2], found[0][2])
    assert torch.equal(found[1][3], found[0][3])
    assert all(size[1] > 1 for size in stand_in)  # single tokens are PyTorch's


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_surprise_is_computed_by_pytorch(variant, stand_in):
    """A call with `output_surprise`, or a config that asks for it, takes no kernel, and has PyTorch's surprise."""
    model, ids = make_model(variant, memory_form="delta", num_persistent_tokens=0), make_ids(2, 21)
    model.config.memory_kernel = "torch"
    expected = model(ids, output_surprise=True).surprise
    model.config.memory_kernel = "auto"
    by_call = model(ids, output_surprise=True).surprise
    model.model.config.output_surprise = True
    by_config = model.model(ids).surprise
    assert not stand_in
    for ours in (by_call, by_config):
        assert all(torch.equal(x.gradient_norm, y.gradient_norm) for x, y in zip(ours, expected, strict=True))


def test_forgetting_everything(stand_in):
    """A gate of 0, whose logarithm is -inf, reaches the kernel as a finite number, and all is forgotten."""
    inputs, state = without_momentum(make_inputs(5), make_state(1, [0, 0, 0]))
    inputs = inputs._replace(log_retain=torch.full_like(inputs.log_retain, -torch.inf))
    kernel, _ = memory_ops._import_chunk_comba()  # which asserts that the gates are finite
    output = memorize_by_kernel(kernel, inputs, state, TokenGrid.identity(B, 5, torch.device("cpu")))
    expected = memorize_reference(inputs, replace(state, anchor=state.weights), UpdateRule(None, True), chunk_size=5)
    assert_same(output.retrieved, expected.retrieved)
    assert_same(output.state.weights, expected.state.weights)


def update(device="cuda", dtype=torch.float32, depth=1, momentum=False, size=8, rule=DELTA):
    """Returns the arguments of `choose_kernel` for tensors without values: a GPU is not needed."""
    with FakeTensorMode():
        shapes = (B, H, 5, size), (B, H, size, size), (B, H, 5)
        keys, weights, gate = (torch.empty(*shape, device=device, dtype=dtype) for shape in shapes)
    layers = (weights,) * depth
    inputs = MemoryInputs(keys, keys, keys, gate, gate if momentum else None, gate)
    return inputs, MemoryState(layers, layers if momentum else (), ()), rule


MISFITS = [
    ("the device 'cpu', not 'cuda'", dict(device="cpu")),
    ("in torch.float64, not torch.float32", dict(dtype=torch.float64)),
    ("2 layers, not 1; the memory has momentum", dict(depth=2, momentum=True)),
    ("the update rule is 'chunk', not 'delta'", dict(rule=UpdateRule(1.0))),
    ("257 entries, more than 256", dict(size=257)),
]


@pytest.mark.parametrize("reason,changes", MISFITS)
def test_what_does_not_fit(reason, changes, monkeypatch):
    """Where the kernel does not fit, asking for it raises an error that says all that does not fit; "auto" takes
    PyTorch and logs one line. Nothing is imported.
    """
    monkeypatch.setattr(memory_ops, "_import_chunk_comba", lambda: pytest.fail("imported"))
    with pytest.raises(ValueError, match=f"must be 'auto' or 'torch' here, but is 'fla': .*{reason}"):
        choose_kernel("fla", *update(**changes))
    messages = []
    memory_ops.logger.info_once.__func__.cache_clear()
    monkeypatch.setattr(memory_ops.logger, "info", lambda message, *_: messages.append(message))
    assert [choose_kernel(name, *update(**changes)) for name in ("auto", "auto", "torch")] == [None] * 3
    assert len(messages) == 1 and reason in messages[0]


def test_the_kernel_is_chosen_where_fla_is_installed(monkeypatch):
    """On a GPU "auto" and "fla" take the kernel, "torch" does not; without fla, "fla" says how to install it."""
    kernel = object()
    monkeypatch.setattr(memory_ops, "_import_chunk_comba", lambda: (kernel, None))
    chosen = {name: choose_kernel(name, *update()) for name in ("auto", "fla", "torch")}
    assert chosen == {"auto": kernel, "fla": kernel, "torch": None}
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "fla.ops.comba", None)  # what makes its import fail
    memory_ops._import_chunk_comba.cache_clear()
    assert choose_kernel("auto", *update()) is None
    with pytest.raises(ValueError, match=r"fla cannot be imported.*pip install 'titans_hf\[gpu\]'"):
        choose_kernel("fla", *update())
    memory_ops._import_chunk_comba.cache_clear()


def test_a_model_asks_for_its_kernel(monkeypatch):
    """A model with "fla" asks for the kernel where several tokens are read."""
    model, asked = make_model("lmm", memory_kernel="fla", memory_form="delta", num_persistent_tokens=0), []
    monkeypatch.setattr("titans_hf.memory_ops.choose_kernel", lambda name, *_: asked.append(name))
    for length in (9, 1):
        full_logits(model, make_ids(2, length))
    assert asked == ["fla"] * model.config.num_hidden_layers


def test_the_published_kernel():
    """In Triton's interpreter, fla's kernel has the outputs, state and gradients of the token loop in float64."""
    missing = [name for name in ("fla", "triton", "einops") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -e '.[gpu]'")
    done = subprocess.run([sys.executable, WORKER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5

"""Compares the kernel of flash-linear-attention in Triton's interpreter, in float32, with the token loop in float64;
prints the largest error.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from titans_hf.memory_network import UpdateRule, layer_shapes
from titans_hf.memory_ops import memorize_by_kernel
from titans_hf.memory_reference import memorize_reference
from titans_hf.memory_state import MemoryInputs, MemoryState
from titans_hf.token_grid import Columns, TokenGrid

SIZE, CHUNK, TOKENS = 16, 16, 45
# Row 0 starts within a chunk, fills three and ends within one. Row 1 has padding before and after, and ends in the
# second chunk.
NUM_SEEN, FIRST, LAST = [5, 32], [0, 3], [TOKENS, 31]
# The form of a memory that fla's kernel computes.
FLA = dict(depth=1, delta_rule=True, momentum=False, clip=None, target=True, expansion=1, heads=2)


class WithoutConversion:
    """Imports one module of fla with a conversion left out: in the interpreter the number is a Python int."""

    def find_spec(self, name, path=None, target=None):
        if name != "fla.ops.common.chunk_delta_h":
            return None
        source = Path(PathFinder.find_spec(name, path).origin).read_text()
        copy = Path(tempfile.mkdtemp(), "chunk_delta_h.py")  # the interpreter reads the source again
        copy.write_text(source.replace("i_t.to(tl.int64)", "i_t"))
        return importlib.util.spec_from_file_location(name, copy)


def kernel_of_fla() -> Callable:
    """Imports `chunk_comba`, for the interpreter."""
    from triton.runtime.autotuner import Autotuner

    sys.meta_path.insert(0, WithoutConversion())
    Autotuner._bench = lambda *args, **kwargs: [0.0]  # the first setting; there is no GPU to time them on
    from fla.ops.comba import chunk_comba

    return chunk_comba


def update_by_fla(kernel: Callable, inputs, state, rule, grid, *, decay_target, **_):
    return memorize_by_kernel(kernel, inputs, state, grid, decay_target)


def draw(
    depth: int, delta_rule: bool, momentum: bool, target: bool, expansion: int, heads: int = 1, **_
) -> dict[str, Tensor]:
    """Draws the tensors of an update of two rows: float32 numbers in float64. With the delta rule, all keys of a row
    are equal, the worst case of the triangular system.
    """
    torch.manual_seed(0)
    vectors = torch.randn(3, 2, heads, TOKENS, SIZE).double()
    queries, keys, values = vectors / vectors.norm(dim=-1, keepdim=True)
    if delta_rule:
        keys[1] = keys[1, :, :1]
    theta, eta, alpha = torch.rand(3, 2, heads, TOKENS).double()
    found = dict(
        queries=queries,
        keys=1.2 * keys,
        values=values,
        inner_lr=(0.5 if delta_rule else 0.2) * theta,
        log_retain=(1 - alpha / 4).log(),
    )
    if momentum:
        found["log_momentum_decay"] = (0.8 * eta).log()
    for i, shape in enumerate(layer_shapes(SIZE, depth, expansion)):
        for name in ("weights", *["momentum"] * momentum, "anchor"):
            found[f"{name} {i}"] = 0.5 * torch.randn(2, heads, *shape).double() / shape[0] ** 0.5
        if target:
            found[f"target {i}"] = 0.3 * torch.randn(heads, *shape).double() / shape[0] ** 0.5
    return {name: x.float().double() for name, x in found.items()}


def run(by_kernel: Callable | None, dtype: torch.dtype, case: dict) -> dict[str, Tensor]:
    """Computes outputs, state and the gradients of a random function of both, by a kernel or the token loop."""
    given = {name: x.to(dtype).requires_grad_() for name, x in draw(**case).items()}

    def layers(name: str) -> tuple[Tensor, ...]:
        return tuple(x for key, x in given.items() if key.startswith(f"{name} "))

    rule = UpdateRule(case["clip"], case["delta_rule"], hidden_step=0.25 if case["delta_rule"] else 1.0)
    state = MemoryState(layers("weights"), layers("momentum"), layers("anchor"), torch.tensor(NUM_SEEN))
    inputs = MemoryInputs(*(given.get(name) for name in MemoryInputs._fields))
    options = dict(chunk_size=CHUNK, decay_target=layers("target"))
    columns = torch.arange(TOKENS)
    mask = (columns >= torch.tensor(FIRST)[:, None]) & (columns < torch.tensor(LAST)[:, None])
    if by_kernel:
        grid = TokenGrid.build(state.num_seen, TOKENS, CHUNK, Columns(mask))
        slots = inputs.map(lambda x: grid.scatter(x.transpose(1, 2)).transpose(1, 2))
        output = by_kernel(slots, state, rule, grid, **options)
        retrieved, after = grid.gather(output.retrieved.transpose(1, 2)).transpose(1, 2), output.state
    else:  # row by row, its tokens alone
        retrieved, states = [], []
        for row, (first, last) in enumerate(zip(FIRST, LAST, strict=True)):
            of_row = inputs.map(lambda x, row=row, first=first, last=last: x[row : row + 1, :, first:last])
            output = memorize_reference(of_row, state.map(lambda x, row=row: x[row : row + 1]), rule, **options)
            states.append(output.state)
            retrieved.append(torch.nn.functional.pad(output.retrieved, (0, 0, first, TOKENS - last)))
        retrieved = torch.cat(retrieved)
        after = states[0].map(lambda *rows: torch.cat(rows), *states[1:])
    outputs = [retrieved, *after.weights, *after.momentum]
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(dtype)).sum() for x in outputs)
    gradients = torch.autograd.grad(loss, list(given.values()), allow_unused=True, materialize_grads=True)
    results = {"retrieved": retrieved} | {f"state after {i}": x for i, x in enumerate(outputs[1:])}
    if rule.needs_anchor(case["depth"]):
        results |= {f"anchor after {i}": x for i, x in enumerate(after.anchor)}
    return results | {f"gradient of {name}": x for name, x in zip(given, gradients, strict=True)}


def largest_error(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest error, each in units of the largest entry of its tensor."""
    assert ours.keys() == expected.keys()
    errors = [(ours[name] - x).abs().max() / x.abs().max() for name, x in expected.items() if x.any()]
    return max(errors).item()


if __name__ == "__main__":
    by_fla = partial(update_by_fla, kernel_of_fla())
    print(largest_error(run(by_fla, torch.float32, FLA), run(None, torch.float64, FLA)))

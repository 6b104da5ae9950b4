"""Compares fla's kernel in Triton's interpreter in float32 with the token loop in float64; prints the largest error."""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from titans_hf.memory_network import UpdateRule
from titans_hf.memory_ops import memorize_by_kernel
from titans_hf.memory_reference import memorize_reference
from titans_hf.memory_state import MemoryInputs, MemoryState
from titans_hf.token_grid import Columns, TokenGrid

SIZE, CHUNK, TOKENS, HEADS = 16, 16, 45, 2
# Row 0 starts within a chunk, fills three and ends within one. Row 1 has padding before and after, and ends in the
# second chunk.
NUM_SEEN, FIRST, LAST = [5, 32], [0, 3], [TOKENS, 31]


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


def draw() -> list[Tensor]:
    """Draws an update of two rows, of float32 numbers in float64. All keys of row 1 are equal, the worst case of the
    triangular system."""
    torch.manual_seed(0)
    vectors = torch.randn(3, 2, HEADS, TOKENS, SIZE).double()
    queries, keys, values = vectors / vectors.norm(dim=-1, keepdim=True)
    keys[1] = keys[1, :, :1]
    theta, alpha = torch.rand(2, 2, HEADS, TOKENS).double()
    weights, target = (torch.randn(*batch, HEADS, SIZE, SIZE).double() / SIZE**0.5 for batch in ((2,), ()))
    drawn = queries, 1.2 * keys, values, 0.5 * theta, (1 - alpha / 4).log(), 0.5 * weights, 0.3 * target
    return [x.float().double() for x in drawn]


def run(kernel: Callable | None, dtype: torch.dtype) -> list[Tensor]:
    """Computes outputs, weights and the gradients of a random function of both, by a kernel or the token loop."""
    given = [x.to(dtype).requires_grad_() for x in draw()]
    *vectors, theta, log_retain, weights, target = given
    inputs = MemoryInputs(*vectors, theta, None, log_retain)
    state = MemoryState((weights,), (), (), torch.tensor(NUM_SEEN))
    if kernel:
        columns = torch.arange(TOKENS)
        mask = (columns >= torch.tensor(FIRST)[:, None]) & (columns < torch.tensor(LAST)[:, None])
        grid = TokenGrid.build(state.num_seen, TOKENS, CHUNK, Columns(mask))
        slots = inputs.map(lambda x: grid.scatter(x.transpose(1, 2)).transpose(1, 2))
        output = memorize_by_kernel(kernel, slots, state, grid, (target,))
        outputs = [grid.gather(output.retrieved.transpose(1, 2)).transpose(1, 2), *output.state.weights]
    else:  # row by row, its tokens alone
        rule, rows = UpdateRule(None, delta_rule=True), []
        for row, (first, last) in enumerate(zip(FIRST, LAST, strict=True)):
            of_row = inputs.map(lambda x, row=row, first=first, last=last: x[row : row + 1, :, first:last])
            own = MemoryState((weights[row : row + 1],), (), (weights[row : row + 1],), state.num_seen[row : row + 1])
            output = memorize_reference(of_row, own, rule, chunk_size=CHUNK, decay_target=(target,))
            rows.append(
                (torch.nn.functional.pad(output.retrieved, (0, 0, first, TOKENS - last)), *output.state.weights)
            )
        outputs = [torch.cat(x) for x in zip(*rows, strict=True)]
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(dtype)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, given)]


if __name__ == "__main__":
    ours, expected = run(kernel_of_fla(), torch.float32), run(None, torch.float64)
    # The largest error, each in units of the largest entry of its tensor.
    print(max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(ours, expected, strict=True)))

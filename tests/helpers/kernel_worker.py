"""Compares fla's kernels in Triton's interpreter, or its PyTorch reference, in float32 with the token loop in float64.

The argument is "titans", "delta" or "reference"; prints the largest error.
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
from torch.nn.functional import pad

from titans_hf.memory_kernels import dplr_delta_rule, gated_delta_rule
from titans_hf.memory_reference import delta_rule_reference

SIZE, TOKENS, HEADS = 16, 45, 2
FIRST, LAST = [0, 3], [TOKENS, 31]  # row 1 has empty slots before and after


class WithoutConversion:
    """Imports modules of fla with a conversion left out: in the interpreter the number is a Python int."""

    NAMES = (
        "fla.ops.common.chunk_delta_h",
        *(f"fla.ops.generalized_delta_rule.dplr.chunk_h_{x}" for x in ("fwd", "bwd")),
    )

    def find_spec(self, name, path=None, target=None):
        if name not in self.NAMES:
            return None
        source = Path(PathFinder.find_spec(name, path).origin).read_text()
        copy = Path(tempfile.mkdtemp(), "module.py")  # the interpreter reads the source again
        copy.write_text(source.replace("i_t.to(tl.int64)", "i_t"))
        return importlib.util.spec_from_file_location(name, copy)


def kernel_of_fla(program: str) -> Callable:
    """Returns the memory's rule by a kernel of fla, for the interpreter, or by fla's reference in PyTorch."""
    from triton.runtime.autotuner import Autotuner

    sys.meta_path.insert(0, WithoutConversion())
    Autotuner._bench = lambda *args, **kwargs: [0.0]  # the first setting; there is no GPU to time them on
    if program == "delta":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return partial(gated_delta_rule, chunk_gated_delta_rule)
    from fla.ops.generalized_delta_rule.dplr import chunk_dplr_delta_rule
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise

    def reference(q, k, v, a, b, gk, scale, initial_state, output_final_state, safe_gate):
        """The kernel's signature; the reference scales queries, takes heads first, and whole chunks of 15 tokens."""
        tensors = (x.transpose(1, 2) for x in (q * scale * q.shape[-1] ** 0.5, k, v, a, b, gk))
        o, state = dplr_chunkwise(*tensors, initial_state=initial_state, chunk_size=15)
        return o.transpose(1, 2), state

    return partial(dplr_delta_rule, reference if program == "reference" else chunk_dplr_delta_rule)


def draw(has_momentum: bool) -> list[Tensor]:
    """Draws arguments of the rule for two rows: float32 numbers in float64. All keys of row 1 are equal, the worst case
    of a system."""
    torch.manual_seed(0)
    vectors = torch.randn(3, 2, HEADS, TOKENS, SIZE).double()
    queries, keys, values = vectors / vectors.norm(dim=-1, keepdim=True)
    keys[1] = keys[1, :, :1]
    theta, eta, alpha = torch.rand(3, 2, HEADS, TOKENS).double()
    m_0, m, s = (torch.randn(*rows, HEADS, SIZE, SIZE).double() / SIZE**0.5 for rows in ((), (2,), (2,)))
    drawn = [queries, 1.2 * keys, values, 0.5 * theta, (0.01 + 0.32 * eta).log(), (1 - 0.6 * alpha).log()]
    drawn += [0.3 * m_0, 0.5 * m, 0.1 * s]
    return [x.float().double() if has_momentum or i not in (4, 8) else None for i, x in enumerate(drawn)]


def run(rule: Callable | None, dtype: torch.dtype, has_momentum: bool) -> list[Tensor]:
    """Computes outputs, state and the gradients of a random function of them, by a kernel or the token loop."""
    given = [None if x is None else x.to(dtype).requires_grad_() for x in draw(has_momentum)]
    if rule:
        slots = torch.arange(TOKENS)
        filled = (slots >= torch.tensor(FIRST)[:, None]) & (slots < torch.tensor(LAST)[:, None])
        o, _, *state = rule(*given, filled)
        outputs = [o * filled[:, None, :, None], *state]
    else:  # row by row, its tokens alone
        rows = []
        for row, (first, last) in enumerate(zip(FIRST, LAST, strict=True)):
            of_row = [None if x is None else x[row : row + 1, :, first:last] for x in given[:6]]
            state = [None if x is None else x[row : row + 1] for x in given[7:]]
            o, _, *state = delta_rule_reference(*of_row, given[6], *state)
            rows.append([pad(o, (0, 0, first, TOKENS - last)), *state])
        outputs = [None if x[0] is None else torch.cat(x) for x in zip(*rows, strict=True)]
    outputs, leaves = ([x for x in xs if x is not None] for xs in (outputs, given))
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(dtype)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, leaves)]


if __name__ == "__main__":
    program = sys.argv[1]
    ours = run(kernel_of_fla(program), torch.float32, program != "delta")
    expected = run(None, torch.float64, program != "delta")
    # The largest error, each in units of the largest entry of its tensor.
    print(max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(ours, expected, strict=True)))

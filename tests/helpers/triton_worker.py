"""Compares fla's kernel in Triton's interpreter with `memorize`; prints the largest errors as JSON."""

import importlib.util
import json
import os
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"


class WithoutConversion:
    """Imports one module of fla with a conversion left out: in the interpreter the number is a Python int."""

    def find_spec(self, name, path=None, target=None):
        if name != "fla.ops.common.chunk_delta_h":
            return None
        source = Path(PathFinder.find_spec(name, path).origin).read_text()
        copy = Path(tempfile.mkdtemp(), "chunk_delta_h.py")  # the interpreter reads the source again
        copy.write_text(source.replace("i_t.to(tl.int64)", "i_t"))
        return importlib.util.spec_from_file_location(name, copy)


sys.meta_path.insert(0, WithoutConversion())

import torch  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

Autotuner._bench = lambda *args, **kwargs: [0.0]  # the first setting; there is no GPU to time them on

from fla.ops.comba import chunk_comba  # noqa: E402

from titans_hf.memory_network import UpdateRule  # noqa: E402
from titans_hf.memory_ops import memorize_by_kernel, memorize_on_grid  # noqa: E402
from titans_hf.memory_state import MemoryInputs, MemoryState  # noqa: E402
from titans_hf.token_grid import TokenGrid  # noqa: E402

ROWS, HEADS, TOKENS, SIZE, CHUNK = 2, 2, 67, 24, 16
RULE = UpdateRule(None, delta_rule=True)


def draw() -> dict[str, torch.Tensor]:
    """Draws the tensors of an update: float32 numbers in float64."""
    torch.manual_seed(0)
    vectors = torch.randn(3, ROWS, HEADS, TOKENS, SIZE).double()
    queries, keys, values = vectors / vectors.norm(dim=-1, keepdim=True)
    theta, alpha = 0.5 * torch.rand(2, ROWS, HEADS, TOKENS).double()
    weights = torch.randn(ROWS, HEADS, SIZE, SIZE).double() / SIZE**0.5
    target = 0.3 * torch.randn(HEADS, SIZE, SIZE).double()
    names = ("queries", "keys", "values", "inner_lr", "log_retain", "weights", "target")
    tensors = (queries, 1.2 * keys, values, theta, (1 - alpha).log(), weights, target)
    return {name: x.float().double() for name, x in zip(names, tensors, strict=True)}


def run(by_kernel: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Computes outputs, state and the gradients of a random function of both; row 1 starts within a chunk."""
    given = {name: x.to(dtype).requires_grad_() for name, x in draw().items()}
    *inputs, weights, target = given.values()
    state = MemoryState((weights,), (), (), torch.tensor([0, 5]))
    inputs = MemoryInputs(*inputs[:4], None, inputs[4])
    grid = TokenGrid.build(state.num_seen, TOKENS, CHUNK)
    slots = inputs.map(lambda x: grid.scatter(x.transpose(1, 2)).transpose(1, 2))
    if by_kernel:
        output = memorize_by_kernel(chunk_comba, slots, state, grid, (target,))
    else:
        output = memorize_on_grid(slots, state, RULE, grid, chunk_size=CHUNK, decay_target=(target,))
    retrieved, (after,) = grid.gather(output.retrieved.transpose(1, 2)), output.state.weights
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(dtype)).sum() for x in (retrieved, after))
    loss.backward()
    results = {"retrieved": retrieved, "after": after, "num_seen": output.state.num_seen}
    return results | {f"gradient of {name}": x.grad for name, x in given.items()}


if __name__ == "__main__":
    ours, expected = run(True, torch.float32), run(False, torch.float64)
    errors = {name: (ours[name] - x).abs().max() / x.abs().max() for name, x in expected.items()}
    print(json.dumps({name: x.item() for name, x in errors.items()}))

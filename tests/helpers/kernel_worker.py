"""Compares kernels in Triton's interpreter, in float32, with the token loop in float64; prints the largest errors as
JSON: "triton", the project's kernels in all cases, or "fla", the kernel of flash-linear-attention in its case.
"""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from covering import covering
from torch import Tensor

from titans_hf import memory_ops
from titans_hf.configuration_titans import TitansConfig
from titans_hf.memory_network import UpdateRule, layer_shapes
from titans_hf.memory_ops import memorize_by_kernel, memorize_on_grid
from titans_hf.memory_reference import memorize_reference
from titans_hf.memory_state import MemoryInputs, MemoryState, named_tensors
from titans_hf.memory_triton import KERNEL_FUNCTIONS
from titans_hf.modeling_titans import TitansForCausalLM
from titans_hf.token_grid import Columns, TokenGrid

SIZE, CHUNK, TOKENS = 16, 16, 45
# Row 0 starts within a chunk, fills three and ends within one. Row 1 has padding before and after, and ends in the
# second chunk.
NUM_SEEN, FIRST, LAST = [5, 32], [0, 3], [TOKENS, 31]
CHOICES = {
    "depth": [1, 2],
    "delta_rule": [False, True],
    "momentum": [False, True],
    "clip": [None, 0.5],
    "target": [False, True],
    "expansion": [1, 2],
}
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


def run_token(by_kernel: Callable | None, dtype: torch.dtype, case: dict) -> dict[str, Tensor]:
    """Computes outputs, surprise and state of one token by a kernel or PyTorch, two heads of rows at the start, in the
    middle and at the end of a chunk.
    """
    given = {name: x.to(dtype) for name, x in draw(**case).items()}

    def layers(name: str) -> tuple[Tensor, ...]:
        found = [x for key, x in given.items() if key.startswith(f"{name} ")]
        return tuple(torch.cat([x, x.flip(-1), x.flip(-2)]).view(-1, 2, *x.shape[-2:]) for x in found)

    tokens = [given.get(name) for name in MemoryInputs._fields]
    inputs = MemoryInputs(*(None if x is None else x[0, 0, :6].view(3, 2, 1, *x.shape[3:]) for x in tokens))
    state = MemoryState(layers("weights"), layers("momentum"), layers("anchor"), torch.tensor([32, 37, 47]))
    rule = UpdateRule(case["clip"], case["delta_rule"], hidden_step=0.25 if case["delta_rule"] else 1.0)
    target = tuple(torch.cat([x, x.flip(-1)]) for key, x in given.items() if key.startswith("target "))
    by_pytorch = partial(memorize_on_grid, kernel="torch")
    grid = TokenGrid.identity(3, 1, "cpu")
    output = (by_kernel or by_pytorch)(inputs, state, rule, grid, chunk_size=CHUNK, decay_target=target)
    return {name: x.to(dtype) for name, x in named_tensors(output)}


def make_model(kernel: str) -> TitansForCausalLM:
    """Makes a model of one layer whose parameters are all random."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=1, num_attention_heads=1)
    memory = dict(memory_num_heads=1, memory_chunk_size=CHUNK, memory_kernel=kernel)
    model = TitansForCausalLM(TitansConfig(variant="lmm", initializer_range=0.2, **sizes, **memory))
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model


def packed_documents(kernel: str) -> dict[str, Tensor]:
    """Computes the logits and gradients of a model with two packed documents."""
    model = make_model(kernel)
    positions = torch.cat([torch.arange(21), torch.arange(36)])[None]
    logits = model((torch.arange(57)[None] ** 2) % 31, position_ids=positions).logits
    logits.square().sum().backward()
    return {"logits": logits} | {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@torch.no_grad()
def single_tokens(kernel: str) -> dict[str, Tensor]:
    """Computes the logits of single tokens of two rows after 14, over a chunk's end; a token of row 1 is padding."""
    model, ids, mask = make_model(kernel), (torch.arange(36).view(2, 18) ** 2) % 31, torch.ones(2, 18)
    mask[1, 15] = 0
    outputs = [model(ids[:, :14], use_cache=True)]
    for i in range(14, 18):
        cache = outputs[-1].cache
        outputs.append(model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], cache=cache))
    logits = torch.cat([x.logits for x in outputs], dim=1)
    return {"logits": logits * mask[..., None]}


def largest_error(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest error, each in units of the largest entry of its tensor."""
    assert ours.keys() == expected.keys()
    errors = [(ours[name] - x).abs().max() / x.abs().max() for name, x in expected.items() if x.any()]
    return max(errors).item()


def compare(computed: Callable, kernel: Callable, case: dict) -> float:
    return largest_error(computed(kernel, torch.float32, case), computed(None, torch.float64, case))


def main(name: str) -> None:
    if name == "fla":
        found = {"fla": compare(run, partial(update_by_fla, kernel_of_fla()), FLA)}
    else:
        found, kernel = {}, partial(memorize_on_grid, kernel=KERNEL_FUNCTIONS)
        for values in covering(2, CHOICES).args[1]:
            case = dict(zip(CHOICES, values.values, strict=True))
            found |= {f"{computed.__name__} {case}": compare(computed, kernel, case) for computed in (run, run_token)}
        memory_ops._misfits_of_any_kernel = lambda weights: {}  # the interpreter has no GPU
        memory_ops.KERNEL_LAYERS = 2
        for of_model in (packed_documents, single_tokens):
            found[of_model.__name__] = largest_error(of_model("triton"), of_model("torch"))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

"""The memory alone: its time relative to the matrix products that it needs.

"of products" is the share of the time that the matrix products of the dual form take by themselves, batched over heads
in the same shapes, without the triangular systems of the delta rule; "of large product" that of as many multiply-adds
in one large product, which runs at "large product TFLOP/s": in float32 on a CPU, in bfloat16 on a GPU. Forward and
backward together count as three forwards.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from titans_hf import TitansConfig
from titans_hf.memory_network import layer_shapes
from titans_hf.memory_ops import compile_chunks, memorize_on_grid
from titans_hf.memory_reference import memorize_reference
from titans_hf.memory_state import MemorizeOutput, MemoryInputs, MemoryState
from titans_hf.neural_memory import NeuralMemory, l2_normalize
from titans_hf.token_grid import TokenGrid

from . import model_shapes
from .measure import Pass, check_close, in_turn, large_product_rate, peak_bytes
from .table_and_plot import Plot

HEAD_DIM = 64
PLOT = Plot(
    "The memory alone: the share of its time that its matrix products take by themselves",
    line=("chunk",),
    x="tokens",
    y={
        "forward of products": "share of products, forward",
        "both of products": "share of products, forward and backward",
    },
)
FIXED = ("hidden_size", "memory_num_heads", "memory_chunk_size")  # set by --heads and --chunks
NUM_CHECKED_TOKENS = 150  # tokens: two chunks of 64 and a part of one
TOLERANCES = {"cpu": 1e-4, "cuda": 1e-2}  # of float32 by a kernel, which may multiply in TF32


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 32768])
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--heads", type=int, default=6, help=f"heads of {HEAD_DIM}")
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument(
        "--compile", action="store_true", help="compile the functions of a chunk, as compile_memory() does"
    )
    model_shapes.add_settings(parser)


def run(args: Namespace) -> Iterator[dict]:
    """Checks and times the memory at every chunk size and length; yields a row of each."""
    if args.compile:
        compile_chunks()
    settings = model_shapes.settings_of("lmm", "tiny", args.set, FIXED)
    large_rate = large_product_rate(torch.bfloat16 if args.device.type == "cuda" else torch.float32, args.device)
    for chunk in args.chunks:
        memory = make_memory(args.heads, chunk, args.device, **settings)
        check(memory)
        for length in tqdm(args.lengths, desc=f"memory, chunk {chunk}"):
            forward, both = make_passes(memory, args.batch_size, length)
            products = Products(memory, args.batch_size)
            num_chunks = -(-length // chunk)
            passes = {"floor": partial(products, num_chunks), "forward": forward, "both": both}
            times = in_turn(passes, args.device, args.repeats)
            row = {"chunk": chunk, "tokens": length}
            for name, share in (("forward", 1), ("both", 3)):
                row |= {
                    f"{name} tokens/s": args.batch_size * length / times[name],
                    f"{name} of products": share * times["floor"] / times[name],
                    f"{name} of large product": share * products.multiply_adds * num_chunks / large_rate / times[name],
                }
            row["large product TFLOP/s"] = 2e-12 * large_rate
            row["forward peak MB"] = peak_bytes(forward, args.device) / 1e6
            row["both peak MB"] = peak_bytes(both, args.device) / 1e6
            yield row


def make_memory(heads: int, chunk: int, device: torch.device, **settings) -> NeuralMemory:
    """Makes a memory of the default form, but for fields of its configuration."""
    sizes = {"hidden_size": heads * HEAD_DIM, "memory_num_heads": heads, "memory_chunk_size": chunk}
    return NeuralMemory(TitansConfig(variant="lmm", **sizes | settings)).to(device)


class Products:
    """All matrix products of a chunk's forward, on random operands of the same shapes."""

    def __init__(self, memory: NeuralMemory, batch_size: int):
        config, rule, device = memory.config, memory.rule, memory.o_proj.weight.device
        chunk, depth, momentum = config.memory_chunk_size, config.memory_depth, int(config.memory_momentum)
        reads = 1 + momentum + int(config.memory_forget)  # of a chunk's start: x W, x S and x I, I what is forgotten to
        pairs = []
        for layer, (d_in, d_out) in enumerate(_shapes(config)):
            tokens, weights = (chunk, d_in), (d_in, d_out)
            delta_rule = rule.delta_rule and layer == depth - 1
            pairs += [(tokens, weights)] * (rule.needs_anchor(depth) + reads)  # k W at the anchor, and q's reads
            pairs += [(tokens, weights)] * (reads * delta_rule)  # k's reads
            pairs += [(tokens, (d_in, chunk))] * (1 + delta_rule) + [((chunk, chunk), (chunk, d_out))]  # q h^T, h h^T
            pairs += [((d_in, chunk), (chunk, d_out))] * (1 + momentum)  # h^T delta for W and S
            pairs += [((chunk, d_out), (d_out, d_in))] if layer else []  # delta W^T
        pairs += [((chunk, chunk), (chunk, chunk))] * momentum  # R E
        num_memories = batch_size * config.memory_num_heads
        self.multiply_adds = num_memories * sum(m * k * n for (m, k), (_, n) in pairs)
        made = {shape: torch.randn(num_memories, *shape, device=device) for pair in pairs for shape in pair}
        self.operands = [(made[a], made[b]) for a, b in pairs]

    def __call__(self, num_chunks: int) -> None:
        for _ in range(num_chunks):
            for a, b in self.operands:
                a @ b


def _shapes(config: TitansConfig) -> list[tuple[int, int]]:
    return layer_shapes(HEAD_DIM, config.memory_depth, config.memory_expansion)


class MemoryCase(NamedTuple):
    """The inputs of a memory, and the weights (H, d_in, d_out) of its layers, with which it starts and to which it
    decays.
    """

    tokens: MemoryInputs
    weights: tuple[Tensor, ...]

    def tensors(self) -> list[Tensor]:
        """Lists all tensors: the tokens' tensors, then the weights."""
        return [*(x for x in self.tokens if x is not None), *self.weights]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "MemoryCase":
        """Applies `fn` to every tensor."""
        return MemoryCase(self.tokens.map(fn), tuple(map(fn, self.weights)))


def draw(memory: NeuralMemory, batch_size: int, length: int, dtype: torch.dtype = torch.float32) -> MemoryCase:
    """Draws inputs for `length` tokens, and weights like those of an untrained model."""
    config, device = memory.config, memory.o_proj.weight.device
    generator = torch.Generator(device).manual_seed(0)
    size = (batch_size, config.memory_num_heads, length)
    gate_size = (*size, config.memory_depth) if config.memory_gates == "layer" else size

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, device=device, generator=generator, dtype=dtype)

    projected = [l2_normalize(uniform(*size, HEAD_DIM) - 0.5) for _ in range(3)]
    inner_lr, log_eta = uniform(*gate_size) / config.memory_chunk_size, uniform(*gate_size).log()
    log_retain = (uniform(*gate_size) / 100).neg().log1p()
    tokens = MemoryInputs(*projected, inner_lr, log_eta if config.memory_momentum else None, log_retain)
    weights = tuple((uniform(config.memory_num_heads, *shape) - 0.5) * 2 / shape[0] ** 0.5 for shape in _shapes(config))
    return MemoryCase(tokens, weights)


def make_passes(memory: NeuralMemory, batch_size: int, length: int) -> tuple[Pass, Pass]:
    """Makes a function that reads `length` tokens, and another that also computes the gradients of all inputs."""
    case = draw(memory, batch_size, length)
    trained = case.map(lambda x: x.clone().requires_grad_())

    def forward() -> None:
        with torch.no_grad():
            memorize_as_models_do(memory, case)

    def both() -> None:
        retrieved = memorize_as_models_do(memory, trained).retrieved
        torch.autograd.grad(retrieved.sum(), trained.tensors())

    return forward, both


def memorize_as_models_do(memory: NeuralMemory, case: MemoryCase) -> MemorizeOutput:
    """Updates and reads the memory by what computes an update in models: a kernel, or PyTorch."""
    config, state = memory.config, _initial_state(memory, case)
    grid = TokenGrid.build(state.num_seen, case.tokens.keys.shape[2], config.memory_chunk_size)
    options = dict(chunk_size=config.memory_chunk_size, decay_target=_target(memory, case), kernel=config.memory_kernel)
    return memorize_on_grid(case.tokens, state, memory.rule, grid, **options)


def _initial_state(memory: NeuralMemory, case: MemoryCase) -> MemoryState:
    batch_size, dtype = len(case.tokens.keys), case.tokens.keys.dtype
    return MemoryState.initial(case.weights, batch_size, dtype, has_momentum=memory.momentum is not None)


def _target(memory: NeuralMemory, case: MemoryCase) -> tuple[Tensor, ...]:
    return case.weights if memory.config.memory_forget and memory.stable else ()


def check(memory: NeuralMemory) -> None:
    """Raises AssertionError unless outputs and gradients equal the token loop's in float64."""
    chunk, exact = memory.config.memory_chunk_size, draw(memory, 1, NUM_CHECKED_TOKENS, torch.float64)

    def by_tokens(case: MemoryCase) -> MemorizeOutput:
        state = _initial_state(memory, case)
        return memorize_reference(case.tokens, state, memory.rule, chunk_size=chunk, decay_target=_target(memory, case))

    results = []
    for compute, dtype in ((partial(memorize_as_models_do, memory), torch.float32), (by_tokens, torch.float64)):
        case = exact.map(lambda x: x.clone().requires_grad_())
        retrieved = compute(case.map(lambda x, dtype=dtype: x.to(dtype))).retrieved
        results.append([retrieved, *torch.autograd.grad(retrieved.square().sum(), case.tensors())])
    names = ["the output", *(f"the gradient of tensor {i}" for i in range(len(exact.tensors())))]
    for name, actual, expected in zip(names, *results, strict=True):
        tolerance = TOLERANCES[expected.device.type]
        check_close(f"chunk {chunk}, depth {memory.config.memory_depth}: {name}", actual, expected, tolerance)

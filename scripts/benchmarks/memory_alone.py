"""The memory alone: its time relative to the matrix products that it needs.

"of products" is the share of the time that the matrix products of the dual form take by themselves, batched over heads
in the same shapes; "of large product" that of as many multiply-adds in one large product. Forward and backward together
count as three forwards.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from titans_hf.memory_network import UpdateRule, layer_shapes
from titans_hf.memory_ops import compile_chunks, memorize
from titans_hf.memory_reference import memorize_reference
from titans_hf.memory_state import MemorizeOutput, MemoryInputs, MemoryState

from .measure import Pass, check_close, in_turn, large_product_rate, peak_bytes
from .table_and_plot import Plot

BATCH, HEADS, HEAD_DIM, DEPTH, EXPANSION = 2, 6, 64, 2, 4
ERROR_CLIP = 1.0
PLOT = Plot(
    "The memory alone: the share of its time that its matrix products take by themselves",
    line=("depth", "chunk"),
    x="tokens",
    y={
        "forward of products": "share of products, forward",
        "both of products": "share of products, forward and backward",
    },
)
NUM_CHECKED_TOKENS = 150  # tokens: two chunks of 64 and a part of one


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 32768])
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--depths", type=int, nargs="+", default=[DEPTH], help="layers of the memory network")
    parser.add_argument(
        "--compile", action="store_true", help="compile the functions of a chunk, as compile_memory() does"
    )


def run(args: Namespace) -> Iterator[dict]:
    """Checks and times the memory at every depth, chunk size and length; yields a row of each."""
    if args.compile:
        compile_chunks()
    large_rate = large_product_rate(torch.float32, args.device)
    cases = [(depth, chunk, length) for depth in args.depths for chunk in args.chunks for length in args.lengths]
    for depth, chunk, length in tqdm(cases, desc="memory"):
        check(depth, chunk, args.device)
        forward, both = make_passes(depth, chunk, length, args.device)
        products = Products(depth, chunk, args.device)
        num_chunks = -(-length // chunk)
        passes = {"floor": lambda p=products, n=num_chunks: p(n), "forward": forward, "both": both}
        times = in_turn(passes, args.device, args.repeats)
        tokens = BATCH * length
        row = {"depth": depth, "chunk": chunk, "tokens": length}
        for name, share in (("forward", 1), ("both", 3)):
            row |= {
                f"{name} tokens/s": tokens / times[name],
                f"{name} of products": share * times["floor"] / times[name],
                f"{name} of large product": share * products.multiply_adds * num_chunks / large_rate / times[name],
            }
        row["forward peak MB"] = peak_bytes(forward, args.device) / 1e6
        row["both peak MB"] = peak_bytes(both, args.device) / 1e6
        yield row


class Products:
    """All matrix products of a chunk's forward, on random operands of the same shapes."""

    def __init__(self, depth: int, chunk: int, device: torch.device):
        pairs = []
        for layer, (d_in, d_out) in enumerate(layer_shapes(HEAD_DIM, depth, EXPANSION)):
            tokens, weights = (chunk, d_in), (d_in, d_out)
            pairs += 4 * [(tokens, weights)]  # k W, q W, q S, q I
            pairs += [(tokens, (d_in, chunk)), ((chunk, chunk), (chunk, d_out))]  # q h^T, scores delta
            pairs += 2 * [((d_in, chunk), (chunk, d_out))]  # h^T delta for W and S
            pairs += [((chunk, d_out), (d_out, d_in))] if layer else []  # delta W^T
        pairs += [((chunk, chunk), (chunk, chunk))]  # R E
        self.multiply_adds = BATCH * HEADS * sum(m * k * n for (m, k), (_, n) in pairs)
        made = {shape: torch.randn(BATCH * HEADS, *shape, device=device) for pair in pairs for shape in pair}
        self.operands = [(made[a], made[b]) for a, b in pairs]

    def __call__(self, num_chunks: int) -> None:
        for _ in range(num_chunks):
            for a, b in self.operands:
                a @ b


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


def draw(depth: int, length: int, chunk: int, device: torch.device, dtype: torch.dtype = torch.float32) -> MemoryCase:
    """Draws inputs for `length` tokens, and weights like those of an untrained model."""
    generator = torch.Generator(device).manual_seed(0)
    size = (BATCH, HEADS, length)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, device=device, generator=generator, dtype=dtype)

    projected = [torch.nn.functional.normalize(uniform(*size, HEAD_DIM) - 0.5, dim=-1) for _ in range(3)]
    gates = [uniform(*size) / chunk, uniform(*size).log(), (uniform(*size) / 100).neg().log1p()]
    shapes = layer_shapes(HEAD_DIM, depth, EXPANSION)
    weights = tuple((uniform(HEADS, *shape) - 0.5) * 2 / shape[0] ** 0.5 for shape in shapes)
    return MemoryCase(MemoryInputs(*projected, *gates), weights)


def make_passes(depth: int, chunk: int, length: int, device: torch.device) -> tuple[Pass, Pass]:
    """Makes a function that reads `length` tokens, and another that also computes the gradients of all inputs."""
    case = draw(depth, length, chunk, device)
    trained = case.map(lambda x: x.clone().requires_grad_())

    def forward() -> None:
        with torch.no_grad():
            _read(memorize, case, chunk)

    def both() -> None:
        torch.autograd.grad(_read(memorize, trained, chunk).sum(), trained.tensors())

    return forward, both


def _read(memory: Callable[..., MemorizeOutput], case: MemoryCase, chunk: int) -> Tensor:
    state = MemoryState.initial(case.weights, BATCH, case.tokens.queries.dtype)
    rule = UpdateRule(ERROR_CLIP)
    return memory(case.tokens, state, rule, chunk_size=chunk, decay_target=case.weights).retrieved


def check(depth: int, chunk: int, device: torch.device) -> None:
    """Raises AssertionError unless outputs and gradients equal the token loop's in float64."""
    results = []
    for memory, dtype in ((memorize, torch.float32), (memorize_reference, torch.float64)):
        case = draw(depth, NUM_CHECKED_TOKENS, chunk, device, torch.float64).map(Tensor.requires_grad_)
        retrieved = _read(memory, case.map(lambda x, dtype=dtype: x.to(dtype)), chunk)
        results.append([retrieved, *torch.autograd.grad(retrieved.square().sum(), case.tensors())])
    names = ["the output", *(f"the gradient of tensor {i}" for i in range(len(case.tensors())))]
    for name, actual, expected in zip(names, *results, strict=True):
        check_close(f"chunk {chunk}, depth {depth}: {name}", actual, expected, 1e-4)

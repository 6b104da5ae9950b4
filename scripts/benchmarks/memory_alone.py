"""The memory alone: its time relative to the matrix products that it needs.

"of products" is the share of the time that the matrix products of the dual form take by themselves, batched over heads
in the same shapes; "of large product" that of as many multiply-adds in one large product. Forward and backward together
count as three forwards.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from titans_hf.memory_network import UpdateRule, layer_shapes
from titans_hf.memory_ops import compile_chunks, memorize
from titans_hf.memory_reference import memorize_reference
from titans_hf.memory_state import MemoryInputs, MemoryState

from .measure import check_close, in_turn, large_product_rate, peak_bytes
from .table_and_plot import Plot

BATCH, HEADS, HEAD_DIM, DEPTH, EXPANSION = 2, 6, 64, 2, 4
ERROR_CLIP = 1.0
PLOT = Plot(
    "The memory alone, as a share of its matrix products",
    line=("depth", "chunk"),
    x="tokens",
    y=("forward of products", "both of products"),
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
    if args.compile:
        compile_chunks()
    large_rate = large_product_rate(torch.float32, args.device)
    cases = [(depth, chunk, length) for depth in args.depths for chunk in args.chunks for length in args.lengths]
    for depth, chunk, length in tqdm(cases, desc="memory"):
        check(depth, chunk, args.device)
        forward, both = work(depth, chunk, length, args.device)
        products = Products(depth, chunk, args.device)
        num_chunks = -(-length // chunk)
        works = {"floor": lambda p=products, n=num_chunks: p(n), "forward": forward, "both": both}
        times = in_turn(works, args.device, args.repeats)
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


def draw(depth: int, length: int, chunk: int, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Draws queries, keys, values, theta, log eta, log(1 - alpha) and the weights like those of an untrained model."""
    generator = torch.Generator(device).manual_seed(0)
    size = (BATCH, HEADS, length)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, device=device, generator=generator, dtype=dtype)

    tokens = [torch.nn.functional.normalize(uniform(*size, HEAD_DIM) - 0.5, dim=-1) for _ in range(3)]
    gates = [uniform(*size) / chunk, uniform(*size).log(), (uniform(*size) / 100).neg().log1p()]
    shapes = layer_shapes(HEAD_DIM, depth, EXPANSION)
    weights = [(uniform(HEADS, *shape) - 0.5) * 2 / shape[0] ** 0.5 for shape in shapes]
    return [*tokens, *gates, *weights]


def work(depth: int, chunk: int, length: int, device: torch.device):
    inputs = draw(depth, length, chunk, device)
    trained = [x.clone().requires_grad_() for x in inputs]

    def forward() -> None:
        with torch.no_grad():
            _read(memorize, inputs, chunk)

    def both() -> None:
        torch.autograd.grad(_read(memorize, trained, chunk).sum(), trained)

    return forward, both


def _read(memory, inputs: list[Tensor], chunk: int) -> Tensor:
    state = MemoryState.initial(inputs[6:], BATCH, inputs[0].dtype)
    tokens, target = MemoryInputs(*inputs[:6]), tuple(inputs[6:])
    return memory(tokens, state, UpdateRule(ERROR_CLIP), chunk_size=chunk, decay_target=target).retrieved


def check(depth: int, chunk: int, device: torch.device) -> None:
    """Raises AssertionError unless outputs and gradients equal those of the token loop in float64."""
    results = []
    for memory, dtype in ((memorize, torch.float32), (memorize_reference, torch.float64)):
        inputs = [x.requires_grad_() for x in draw(depth, NUM_CHECKED_TOKENS, chunk, device, torch.float64)]
        retrieved = _read(memory, [x.to(dtype) for x in inputs], chunk)
        results.append([retrieved, *torch.autograd.grad(retrieved.square().sum(), inputs)])
    names = ["the output", *(f"the gradient of input {i}" for i in range(len(inputs)))]
    for name, actual, expected in zip(names, *results, strict=True):
        check_close(f"chunk {chunk}, depth {depth}: {name}", actual, expected, 1e-4)

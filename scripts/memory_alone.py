"""The layer of a memory alone, by the program of its update, or a Gated DeltaNet layer of equal size.

Before a program is timed, its outputs and gradients must be those of float64.
"""

from argparse import Namespace
from collections.abc import Iterator
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from eval.common.compared_models import parse_settings
from scripts.measure import least_seconds, peak_bytes, unless_out_of_memory
from titans_hf import TitansConfig
from titans_hf.neural_memory import NeuralMemory

HEAD_DIM, CHECKED_TOKENS = 64, 342
OTHER = "gated-deltanet"
PROGRAMS = ("torch", "auto", OTHER)
TOLERANCES = {"cpu": 1e-4, "cuda": 1e-2}  # of float32 by a kernel, which may multiply in TF32


def make_layer(args: Namespace) -> nn.Module:
    """Makes the layer of a program, in float32. Raises ValueError for a setting that is not possible."""
    torch.manual_seed(0)
    size = args.heads * HEAD_DIM
    if args.program == OTHER:
        from fla.layers import GatedDeltaNet

        return GatedDeltaNet(size, expand_v=1, head_dim=HEAD_DIM, num_heads=args.heads).to(args.device)
    sizes = {"hidden_size": size, "memory_num_heads": args.heads, "memory_kernel": args.program}
    settings = parse_settings(args.set, TitansConfig())
    return NeuralMemory(TitansConfig(variant="lmm", **sizes | settings)).to(args.device)


def draw(args: Namespace, length: int, dtype: torch.dtype) -> Tensor:
    """Draws the hidden states (B, length, hidden) that a layer reads."""
    return torch.randn(args.batch_size, length, args.heads * HEAD_DIM, device=args.device, dtype=dtype)


def forward(layer: nn.Module, hidden_states: Tensor) -> None:
    """Reads hidden states without gradients."""
    with torch.no_grad():
        layer(hidden_states)


def both(layer: nn.Module, hidden_states: Tensor) -> None:
    """Computes the gradients of all parameters."""
    torch.autograd.backward(layer(hidden_states)[0], torch.ones_like(hidden_states))
    layer.zero_grad()


def check(args: Namespace, layer: NeuralMemory) -> None:
    """Raises AssertionError unless a program's outputs and gradients are those of PyTorch in float64."""
    layer = deepcopy(layer)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    reference = deepcopy(layer).double()
    reference.config.memory_kernel = "torch"
    hidden_states, results = draw(args, CHECKED_TOKENS, torch.float64), []
    for program in (reference, layer):
        output = program(hidden_states.to(program.o_proj.weight.dtype))[0]
        results.append([output, *torch.autograd.grad(output.square().sum(), list(program.parameters()))])
    names = ["the output", *(f"the gradient of {name}" for name, _ in layer.named_parameters())]
    for name, expected, actual in zip(names, *results, strict=True):
        distance = (actual - expected).norm() / expected.norm().clamp_min(1e-30)
        if not distance <= TOLERANCES[args.device.type]:
            raise AssertionError(f"{args.program}: {name} is off by {distance:.1e} of its length")


def memory(args: Namespace) -> Iterator[dict]:
    """Times the layer at every length; yields a row of each."""
    dtype, layer = getattr(torch, args.dtype), make_layer(args)
    if args.program != OTHER:
        check(args, layer)
    layer = layer.to(dtype)
    for length in args.lengths:
        hidden_states, tokens = draw(args, length, dtype), args.batch_size * length
        row = {"program": args.program, "tokens": length}
        for name, run in (("forward", forward), ("both", both)):
            run_once = partial(run, layer, hidden_states)
            least = unless_out_of_memory(partial(least_seconds, run_once, args.device, args.repeats))
            peak = unless_out_of_memory(partial(peak_bytes, run_once, args.device))
            row |= {f"{name} tokens/s": least and tokens / least, f"{name} peak MB": peak and peak / 1e6}
            layer.zero_grad()  # what a backward without enough memory has left
        yield row

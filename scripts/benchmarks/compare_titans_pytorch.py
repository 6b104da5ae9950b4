"""The memory as a layer, compared with titans-pytorch 0.5.5, which is installed in an environment of its own.

    python -m venv other && other/bin/pip install titans-pytorch==0.5.5
    python -m scripts.bench titans-pytorch --python other/bin/python

Width 384, six heads, two layers of the memory network, ours in the paper's form. Its chunk_size 1 computes what ours
computes: gates and retrievals for every token, and gradients at the weights of every 64th token. Its chunk_size 64
computes less: one gate and one retrieval for 64 tokens.
"""

import json
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from titans_hf import TitansConfig
from titans_hf.neural_memory import NeuralMemory

from . import memory_alone
from .measure import Pass, peak_bytes, seconds
from .table_and_plot import Plot

WIDTH, HEADS, BATCH, CHUNK = 384, 6, 2, 64
PAPER_FORM = {"memory_update_rule": "chunk", "memory_depth": 2, "memory_expansion": 4, "memory_output_norm": "rms"}
PLOT = Plot(
    "The memory beside that of titans-pytorch",
    line=("its chunk_size", "pass"),
    x="tokens",
    y={"times faster": "its time / ours", "its memory of ours": "its peak memory / ours"},
)
CASES = ((1, 256), (1, 512), (CHUNK, 256), (CHUNK, 512), (CHUNK, 2048), (CHUNK, 8192))


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--python", required=True, help="the interpreter that has titans-pytorch")


def run(args: Namespace) -> Iterator[dict]:
    """Checks our memory, then times both layers by turns; yields a row per case and pass."""
    if args.device.type != "cpu":
        raise ValueError(f"--device {args.device}: this comparison is made on the CPU only")
    memory_alone.check(make_memory())
    with Worker(args.python) as worker:
        for chunk_size, length in tqdm(CASES, desc="titans-pytorch"):
            for backward in (False, True):
                run_layer = make_pass(length, backward)
                case = {"chunk_size": chunk_size, "batch_size": CHUNK, "batch": BATCH, "length": length}
                case |= {"backward": backward, "repeats": 1}
                pairs = []
                for _ in range(args.repeats):
                    run_layer()
                    pairs.append((seconds(run_layer, args.device), worker.ask(case, "seconds")))
                ours, theirs = (median(times) for times in zip(*pairs, strict=True))
                peaks = peak_bytes(run_layer, args.device), worker.ask(case, "peak")
                yield {
                    "its chunk_size": chunk_size,
                    "tokens": length,
                    "pass": "forward and backward" if backward else "forward",
                    "ours tokens/s": BATCH * length / ours,
                    "its tokens/s": BATCH * length / theirs,
                    "times faster": median(its / our for our, its in pairs),
                    "ours peak MB": peaks[0] / 1e6,
                    "its peak MB": peaks[1] / 1e6,
                    "its memory of ours": peaks[1] / peaks[0],
                }


def make_memory() -> NeuralMemory:
    """Makes our layer, which does the work of theirs: not today's default, of one layer and the delta rule."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "memory_chunk_size": CHUNK}
    return NeuralMemory(TitansConfig(variant="lmm", **sizes, **PAPER_FORM), layer_idx=0)


def make_pass(length: int, backward: bool) -> Pass:
    """Makes a function that runs the whole layer: projections, convolutions, gates, memory, norm; with its gradients if
    `backward`.
    """
    module = make_memory()
    tokens = torch.randn(BATCH, length, WIDTH, requires_grad=backward)
    trained = [tokens, *module.parameters()]

    def run_layer() -> None:
        with torch.set_grad_enabled(backward):
            retrieved, _ = module(tokens)
            if backward:
                torch.autograd.grad(retrieved.sum(), trained)

    return run_layer


class Worker:
    """Runs `titans_pytorch_worker.py` in the other interpreter."""

    def __init__(self, python: str):
        command = [python, str(Path(__file__).with_name("titans_pytorch_worker.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error) -> None:
        self.process.stdin.close()
        self.process.wait()

    def ask(self, case: dict, what: str) -> float:
        self.process.stdin.write(json.dumps(case | {"what": what}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"titans-pytorch's process ended on {case}; its error is above")
        return json.loads(answer)

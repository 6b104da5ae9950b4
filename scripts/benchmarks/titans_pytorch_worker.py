"""Measures titans-pytorch in its own environment: reads a line of JSON per measurement, writes a line with the figure.

{"chunk_size": 1, "batch_size": 64, "batch": 2, "length": 256, "backward": true, "what": "seconds" or "peak"}
"""

import json
import sys
from typing import Any

import torch
from measure import Pass, peak_bytes, seconds
from titans_pytorch import NeuralMemory

WIDTH, HEADS = 384, 6


def make_memory(chunk_size: int, batch_size: int) -> NeuralMemory:
    """Makes the layer with two layers of the memory network; weights from seed 0."""
    torch.manual_seed(0)
    return NeuralMemory(
        dim=WIDTH,
        heads=HEADS,
        dim_head=WIDTH // HEADS,
        chunk_size=chunk_size,
        batch_size=batch_size,
        default_model_kwargs={"depth": 2, "expansion_factor": 4.0},
    )


def make_pass(case: dict[str, Any]) -> Pass:
    """Makes a function that runs the layer on a case's tokens, with its gradients if the case has "backward"."""
    memory = make_memory(case["chunk_size"], case["batch_size"])
    tokens = torch.randn(case["batch"], case["length"], WIDTH, requires_grad=case["backward"])
    trained = [tokens, *(parameter for parameter in memory.parameters() if parameter.requires_grad)]

    def run_layer() -> None:
        with torch.set_grad_enabled(case["backward"]):
            retrieved = memory(tokens)[0]
            if case["backward"]:
                torch.autograd.grad(retrieved.sum(), trained, allow_unused=True)

    return run_layer


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    for line in sys.stdin:
        case = json.loads(line)
        run_layer = make_pass(case)
        if case["what"] == "peak":
            answer = peak_bytes(run_layer, device)
        else:
            run_layer()
            answer = min(seconds(run_layer, device) for _ in range(case["repeats"]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

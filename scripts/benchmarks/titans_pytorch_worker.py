"""Measures titans-pytorch in its own environment: reads a line of JSON per measurement, writes a line with the figure.

{"chunk_size": 1, "batch_size": 64, "batch": 2, "length": 256, "backward": true, "what": "seconds" or "peak"}
"""

import json
import sys

import torch
from measure import peak_bytes, seconds
from titans_pytorch import NeuralMemory

WIDTH, HEADS = 384, 6


def make(chunk_size: int, batch_size: int) -> NeuralMemory:
    torch.manual_seed(0)
    return NeuralMemory(
        dim=WIDTH,
        heads=HEADS,
        dim_head=WIDTH // HEADS,
        chunk_size=chunk_size,
        batch_size=batch_size,
        default_model_kwargs={"depth": 2, "expansion_factor": 4.0},
    )


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    for line in sys.stdin:
        case = json.loads(line)
        memory = make(case["chunk_size"], case["batch_size"])
        tokens = torch.randn(case["batch"], case["length"], WIDTH, requires_grad=case["backward"])

        def work(case=case, memory=memory, tokens=tokens) -> None:
            with torch.set_grad_enabled(case["backward"]):
                retrieved = memory(tokens)[0]
                if case["backward"]:
                    torch.autograd.grad(retrieved.sum(), [tokens, *_used(memory)], allow_unused=True)

        if case["what"] == "peak":
            answer = peak_bytes(work, device)
        else:
            work()
            answer = min(seconds(work, device) for _ in range(case["repeats"]))
        print(json.dumps(answer), flush=True)


def _used(memory: NeuralMemory) -> list[torch.nn.Parameter]:
    return [parameter for parameter in memory.parameters() if parameter.requires_grad]


if __name__ == "__main__":
    main()

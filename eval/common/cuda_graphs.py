"""Records a step of training as a CUDA graph, which launches its thousands of small kernels at once."""

from collections.abc import Callable

import torch
from torch import Tensor

NUM_WARMUP_STEPS = 3


def record_step(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Calls `step` a few times, then records it, and returns its replay.

    The replay works on the tensors of the recorded call: its inputs have to be copied into them, and what it returns is
    overwritten by the next. What the calls change stays changed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARMUP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay

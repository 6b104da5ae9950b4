"""Records a step of training as a CUDA graph, which launches its thousands of small kernels at once."""

from collections.abc import Callable

import torch
from torch import Tensor

NUM_WARMUP_STEPS = 3


def record_step(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Calls `step` a few times, then records it, and returns its replay.

    The replay works on the tensors of the recorded call: new inputs have to be copied into them, and the next
    replay overwrites the result. The calls before the recording have their effects as well.
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

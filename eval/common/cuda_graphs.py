"""Records a step of training as a CUDA graph, which launches its thousands of small kernels at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

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


class GraphTrainer(Trainer):
    """Trains as Trainer does. The pass is recorded with the first batch; batches of another size are not replayed.

    The model may not depend on anything but its parameters and the batch, so it may have no dropout.
    """

    replay = None

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """Leaves the gradients in the parameters and returns the loss."""
        inputs = self._prepare_inputs(inputs)
        if self.replay is None:
            self._record(model, inputs)
        if any(self.inputs[name].shape != x.shape for name, x in inputs.items()):
            return super().training_step(model, inputs, num_items_in_batch)
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        loss = self.replay().clone()
        for parameter, gradient in zip(model.parameters(), self.gradients, strict=True):
            parameter.grad = gradient
        return loss

    def _record(self, model: nn.Module, inputs: dict[str, Tensor]) -> None:
        self.inputs = {name: x.clone() for name, x in inputs.items()}
        model.train()

        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            loss = self.compute_loss(model, dict(self.inputs))
            loss.backward()
            return loss.detach()

        self.replay = record_step(step)
        self.gradients = [parameter.grad for parameter in model.parameters()]

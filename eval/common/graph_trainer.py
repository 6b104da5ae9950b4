"""A Trainer that replays the forward and backward pass of small models as one CUDA graph."""

from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from eval.common.cuda_graphs import record_step


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

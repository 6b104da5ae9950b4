"""`titans-hf train --cuda_graph true`: loss and gradients of a batch by one CUDA graph."""

from typing import Any

import torch

from titans_hf.cli.training.run_folder import CardTrainer
from titans_hf.memory_graphs import Recorded


class GraphTrainer(CardTrainer):
    """Records the loss and the gradients of batches of one shape without a mask, which the host would read."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.recorded = Recorded(self._loss_and_gradients, num_trees=2)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        inputs = self._prepare_inputs(inputs)
        if "attention_mask" in inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        constants = (tuple(inputs), self.current_gradient_accumulation_steps)
        loss, gradients = self.recorded(tuple(inputs.values()), num_items_in_batch, *constants)
        for x, gradient in zip(filter(lambda x: x.requires_grad, self.model.parameters()), gradients, strict=True):
            x.grad = gradient if x.grad is None else x.grad + gradient
        return loss

    def _loss_and_gradients(self, inputs: tuple, number: torch.Tensor | None, names: tuple, steps: int) -> tuple:
        given = dict(zip(names, inputs, strict=True))
        with torch.enable_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(self.model_wrapped, given, num_items_in_batch=number)
            loss = loss / steps if number is None else loss
        trained = [x for x in self.model.parameters() if x.requires_grad]
        return loss.detach(), torch.autograd.grad(loss, trained, allow_unused=True)

"""eval/common/harness.py: a training has as many steps as asked for."""

from types import SimpleNamespace

import torch
from covering import in_one_test

from eval.common.harness import optimise


@in_one_test("steps", [1, 9, 10, 11, 20])
def test_a_training_of_any_number_of_steps(steps):
    """Every step changes the weights, also where a tenth of the steps is one step or less."""
    model, seen = torch.nn.Linear(1, 1).double(), []

    def draw_loss(generator):
        seen.append(model.weight.item())
        return model(torch.ones(1).double()).square().sum()

    optimise(model, draw_loss, SimpleNamespace(name="tiny", learning_rate=0.1, steps=steps, seed=0))
    assert len(set(seen) | {model.weight.item()}) == steps + 1

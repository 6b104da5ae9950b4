"""Trains a language model on random blocks of token ids; on a GPU, a whole step is one CUDA graph."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, get_scheduler

from eval.common.cuda_graphs import record_step

NUM_REPORTS = 16


class TrainingOptions(NamedTuple):
    """steps and batch_size of a run; learning_rate at its highest; seed of the order of the blocks; bf16: matrix
    products in bfloat16; graph: replay every step as a CUDA graph, which launches thousands of small kernels at once.
    """

    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    bf16: bool
    graph: bool


def train(
    model: PreTrainedModel, blocks: np.ndarray, options: TrainingOptions, report: Callable[[int, float], None]
) -> None:
    """Trains on random blocks (N, T) with AdamW; calls `report(step, mean loss since the last report)` now and then."""
    device = model.device
    optimizer = make_optimizer(model, options.learning_rate)
    blocks = torch.from_numpy(blocks)
    ids = blocks[: options.batch_size].to(device)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16, cache_enabled=False):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    model.train()
    if options.graph:
        step = capture_step(step, model, optimizer)
    total, interval = torch.zeros((), device=device), max(1, options.steps // NUM_REPORTS)
    batches = random_batches(len(blocks), options.batch_size, options.seed)
    for number, rate in enumerate(learning_rates(options.learning_rate, options.steps), 1):
        ids.copy_(blocks[next(batches)])
        for group in optimizer.param_groups:
            group["lr"].fill_(rate)
        total += step()
        if number % interval == 0:
            report(number, total.item() / interval)
            total.zero_()


def make_optimizer(model: PreTrainedModel, learning_rate: float) -> torch.optim.AdamW:
    """Makes AdamW; weights decay as Trainer has it, all but biases and norms. The rate is a tensor, for a graph."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    groups = [
        {"params": [x for name, x in model.named_parameters() if (name in decayed) == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    on_gpu = model.device.type == "cuda"
    rate = torch.tensor(learning_rate, device=model.device)
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), capturable=on_gpu, fused=on_gpu)


def learning_rates(learning_rate: float, steps: int) -> Iterator[float]:
    """Yields the learning rate of every step: warm-up over a twentieth of them, then a cosine to a tenth."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=learning_rate)
    scheduler = get_scheduler("cosine_with_min_lr", optimizer, int(0.05 * steps), steps, {"min_lr_rate": 0.1})
    for _ in range(steps):
        yield scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()


def random_batches(num_blocks: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yields indices of `batch_size` blocks without end: every block once before any is taken again."""
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < batch_size:
            order = torch.cat([order, torch.randperm(num_blocks, generator=generator)])
        yield order[:batch_size]
        order = order[batch_size:]


def capture_step(
    step: Callable[[], Tensor], model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> Callable[[], Tensor]:
    """Captures a step as a CUDA graph and returns its replay. Weights stay as they are, the optimizer as new."""
    weights = [x.detach().clone() for x in model.parameters()]
    replay = record_step(step)
    with torch.no_grad():
        for x, before in zip(model.parameters(), weights, strict=True):
            x.copy_(before)
        for x in (x for state in optimizer.state.values() for x in state.values()):
            x.zero_()
    return replay

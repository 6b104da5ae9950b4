"""Truncated backpropagation through time: every batch continues from the memory state after the batch before."""

from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals
from transformers import PreTrainedConfig, TrainingArguments

from titans_hf import TitansCache
from titans_hf.cache_layer import KeyValueCache, LayerState
from titans_hf.cache_titans import TitansCacheLayer
from titans_hf.cli.training.arguments import DataArguments
from titans_hf.cli.training.run_folder import CardTrainer
from titans_hf.memory_state import MemoryState


def check_carry_memory(config: PreTrainedConfig, args: TrainingArguments, data: DataArguments) -> None:
    """Raises ValueError for options that cannot be combined with --carry_memory."""
    refused = {
        f"a {config.model_type} model, which has no memory": config.model_type != "titans",
        "--activation_checkpointing (or --gradient_checkpointing), which would update a carried memory twice": (
            args.activation_checkpointing
        ),
        f"--train_sampling_strategy {args.train_sampling_strategy}: the blocks of a document follow each other": (
            args.train_sampling_strategy != "sequential"
        ),
        "--auto_find_batch_size: the rows of a batch are fixed": args.auto_find_batch_size,
        "several GPUs in one process: use accelerate launch": args.n_gpu > 1,
        "--streaming: the blocks are ordered by their number": data.streaming,
        "--max_eval_blocks: blocks are evaluated one after the other": data.max_eval_blocks is not None,
    }
    for reason in [reason for reason, holds in refused.items() if holds]:
        raise ValueError(f"--carry_memory cannot be combined with {reason}")


class CarriedMemoryTrainer(CardTrainer):
    """A Trainer over `contiguous_batches.ContiguousBatches` (training and evaluation), in their order.

    The cache passes from batch to batch, detached, so that gradients stay within a batch; a row is reset where a
    document starts. Gradient accumulation passes it from micro-batch to micro-batch. Evaluation has a cache of its own.
    Checkpoints hold the cache of the training.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.caches: dict[bool, TitansCache] = {}  # {True: of training, False: of evaluation}

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Any:
        cache = self._cache(inputs.pop("row_starts"), training=True)
        result = super().compute_loss(model, {**inputs, "past_key_values": cache}, *args, **kwargs)
        cache.detach()
        return result

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Any:
        inputs = self._prepare_inputs(inputs)
        cache = self._cache(inputs.pop("row_starts"), training=False)
        return super().prediction_step(model, {**inputs, "past_key_values": cache}, *args, **kwargs)

    def _cache(self, row_starts: torch.Tensor, training: bool) -> TitansCache:
        """Returns the cache of the batch before, with the rows reset that start a document."""
        if row_starts.all():
            self.caches[training] = TitansCache(self.model.config)
        else:
            self.caches[training].reset(row_starts)
        return self.caches[training]

    def _carried_path(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"carried_memory_{self.args.process_index}.pt"

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves the cache with the other state of each process."""
        super()._save_rng_state(output_dir)
        torch.save(self.caches[True], self._carried_path(output_dir))

    def train(self, resume_from_checkpoint: str | None = None, **kwargs) -> Any:
        if resume_from_checkpoint is not None:
            path = self._carried_path(resume_from_checkpoint)
            with safe_globals([TitansCache, TitansCacheLayer, LayerState, KeyValueCache, MemoryState]):
                self.caches[True] = torch.load(path, map_location=self.args.device, weights_only=True)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

"""Truncated backpropagation through time: every batch continues from the memory state after the batch before."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.serialization import safe_globals
from transformers import PreTrainedConfig, TrainingArguments

from titans_hf import TitansCache
from titans_hf.cache_layer import KeyValueCache, LayerState
from titans_hf.cache_titans import TitansCacheLayer
from titans_hf.cli.training.arguments import DataArguments
from titans_hf.cli.training.contiguous_batches import IGNORED, ContiguousBatches
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
            args.train_sampling_strategy not in (None, "sequential")
        ),
        "--auto_find_batch_size: the rows of a batch are fixed": args.auto_find_batch_size,
        "several GPUs in one process: use accelerate launch": args.n_gpu > 1,
        "--packing false: no document is longer than a block": not data.packing,
        "--streaming: the blocks are ordered by their number": data.streaming,
        "--max_eval_blocks: blocks are evaluated one after the other": data.max_eval_blocks is not None,
    }
    for reason, holds in refused.items():
        if holds:
            raise ValueError(f"--carry_memory cannot be combined with {reason}")


class CarriedMemoryTrainer(CardTrainer):
    """A Trainer over `ContiguousBatches` (training and evaluation), in their order.

    The cache passes from batch to batch, detached, so that gradients stay within a batch; a row is reset where a
    document starts. Gradient accumulation passes it from micro-batch to micro-batch. Evaluation has a cache of its own.
    Checkpoints hold the cache of the training.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.caches: dict[bool, TitansCache] = {}  # {True: of training, False: of evaluation}

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch=None
    ) -> Any:
        cache = self._cache(inputs.pop("row_starts"), self.train_dataset, training=True)
        inputs = {**inputs, "past_key_values": cache}
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        cache.detach()
        return result

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Returns summed loss and number of predicted tokens of every row, as `train.perplexity` takes them."""
        inputs = self._prepare_inputs(inputs)
        targets = inputs.pop("shift_labels")
        del inputs["labels"]
        cache = self._cache(inputs.pop("row_starts"), self.eval_dataset, training=False)
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs, past_key_values=cache).logits
        losses = F.cross_entropy(logits.mT.float(), targets, reduction="none", ignore_index=IGNORED)
        return None, losses.sum(1), (targets != IGNORED).sum(1)

    def _cache(self, row_starts: torch.Tensor, data: ContiguousBatches, training: bool) -> TitansCache:
        """Returns the cache of the batch before, with the rows reset that start a document."""
        if len(row_starts) * self.args.world_size != data.num_rows:
            raise ValueError(
                f"the batch has {len(row_starts)} rows in each of {self.args.world_size} processes, but the data was "
                f"arranged for {data.num_rows} rows in all: resume with the batch size of the checkpoint"
            )
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
        saved = {"num_rows": self.train_dataset.num_rows, "cache": self.caches[True]}
        torch.save(saved, self._carried_path(output_dir))

    def train(self, resume_from_checkpoint: str | None = None, **kwargs) -> Any:
        if resume_from_checkpoint is not None:
            path = self._carried_path(resume_from_checkpoint)
            if not path.exists():
                raise FileNotFoundError(f"{path}: the checkpoint was not made with --carry_memory and these processes")
            with safe_globals([TitansCache, TitansCacheLayer, LayerState, KeyValueCache, MemoryState]):
                saved = torch.load(path, map_location=self.args.device, weights_only=True)
            if saved["num_rows"] != self.train_dataset.num_rows:
                raise ValueError(
                    f"the checkpoint carries {saved['num_rows']} rows, but a batch has {self.train_dataset.num_rows} "
                    "(--per_device_train_batch_size times processes): they have to be the same to resume"
                )
            self.caches[True] = saved["cache"]
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

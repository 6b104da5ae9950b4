"""Truncated backpropagation through time: every batch goes on with what the memory holds after the one before."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lanes import IGNORED, Lanes
from run_folder import CardTrainer
from torch.serialization import safe_globals
from transformers import PreTrainedConfig, TrainingArguments

from titans_hf import TitansCache
from titans_hf.cache_titans import TitansCacheLayer
from titans_hf.layer_state import KeyValueCache, LayerState
from titans_hf.memory_state import MemoryState


def check_carry_memory(
    config: PreTrainedConfig, args: TrainingArguments, max_eval_blocks: int | None, packing: bool
) -> None:
    """Raises ValueError for options that cannot be combined with --carry_memory."""
    refused = {
        f"a {config.model_type} model, which has no memory": config.model_type != "titans",
        "--activation_checkpointing (or --gradient_checkpointing), which would read a carried memory twice": (
            args.activation_checkpointing
        ),
        f"--train_sampling_strategy {args.train_sampling_strategy}: the blocks of a document follow each other": (
            args.train_sampling_strategy not in (None, "sequential")
        ),
        "--auto_find_batch_size: the rows of a batch are fixed": args.auto_find_batch_size,
        "several GPUs in one process: use accelerate launch": args.n_gpu > 1,
        "--packing false: no document is longer than a block": not packing,
        "--max_eval_blocks: blocks are evaluated one after the other": max_eval_blocks is not None,
    }
    for reason, holds in refused.items():
        if holds:
            raise ValueError(f"--carry_memory cannot be combined with {reason}")


class CarryTrainer(CardTrainer):
    """A Trainer over `Lanes` (training and evaluation), in the order that they come in.

    The cache passes from batch to batch, detached, so that gradients stay within a batch; a row starts anew where its
    document does. Gradient accumulation reads on from micro-batch to micro-batch. Evaluation carries a cache of its
    own. Checkpoints hold the training's cache.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.caches: dict[bool, TitansCache] = {}  # by whether it is the training's

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch=None
    ) -> Any:
        cache = self._cache(inputs.pop("begins"), self.train_dataset, training=True)
        inputs = {**inputs, "past_key_values": cache}
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        cache.detach()
        return result

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Summed loss and number of predicted tokens of every row, as `train.perplexity` takes them."""
        inputs = self._prepare_inputs(inputs)
        targets = inputs.pop("shift_labels")
        del inputs["labels"]
        cache = self._cache(inputs.pop("begins"), self.eval_dataset, training=False)
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs, past_key_values=cache).logits
        losses = F.cross_entropy(logits.mT.float(), targets, reduction="none", ignore_index=IGNORED)
        return None, losses.sum(1), (targets != IGNORED).sum(1)

    def _cache(self, begins: torch.Tensor, lanes: Lanes, training: bool) -> TitansCache:
        """What the rows go on with; those that begin start anew."""
        if len(begins) * self.args.world_size != lanes.num_lanes:
            raise ValueError(
                f"the batch has {len(begins)} rows in each of {self.args.world_size} processes, but the data was "
                f"arranged for {lanes.num_lanes} rows in all: resume with the batch size of the checkpoint"
            )
        if begins.all():
            self.caches[training] = TitansCache(self.model.config)
        else:
            self.caches[training].reset(begins)
        return self.caches[training]

    def _carried_path(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"carried_memory_{self.args.process_index}.pt"

    def _save_rng_state(self, output_dir: str) -> None:
        """With the other state that every process has of its own."""
        super()._save_rng_state(output_dir)
        saved = {"num_lanes": self.train_dataset.num_lanes, "cache": self.caches[True]}
        torch.save(saved, self._carried_path(output_dir))

    def train(self, resume_from_checkpoint: str | None = None, **kwargs) -> Any:
        if resume_from_checkpoint is not None:
            path = self._carried_path(resume_from_checkpoint)
            if not path.exists():
                raise FileNotFoundError(f"{path}: the checkpoint was not made with --carry_memory and these processes")
            with safe_globals([TitansCache, TitansCacheLayer, LayerState, KeyValueCache, MemoryState]):
                saved = torch.load(path, map_location=self.args.device, weights_only=True)
            if saved["num_lanes"] != self.train_dataset.num_lanes:
                raise ValueError(
                    f"the checkpoint carries {saved['num_lanes']} rows, but a batch has {self.train_dataset.num_lanes} "
                    "(--per_device_train_batch_size times processes): they have to be the same to resume"
                )
            self.caches[True] = saved["cache"]
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

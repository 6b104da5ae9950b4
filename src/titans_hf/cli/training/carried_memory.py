"""Truncated backpropagation through time: every batch continues from the memory state after the batch before.

The stream of all documents is cut into stretches of about equal length, one per row of a batch. Row b of batch t is
block t of stretch b. A stretch may start within a document; every token is in exactly one batch.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.functional import pad
from torch.serialization import safe_globals
from transformers import PreTrainedConfig, TrainingArguments

from titans_hf import TitansCache
from titans_hf.cache_layer import KeyValueCache, LayerState, WindowCache
from titans_hf.cache_titans import TitansCacheLayer
from titans_hf.cli.training.arguments import RunArguments
from titans_hf.cli.training.data import PackedBlocks, pad_rows
from titans_hf.cli.training.run_folder import CardTrainer
from titans_hf.memory_state import MemoryState

IGNORED = -100
# The classes that a file of a carried memory may hold.
PARTS_OF_A_CACHE = [TitansCacheLayer, LayerState, MemoryState, KeyValueCache, WindowCache]


class ContiguousBatches(torch.utils.data.Dataset):
    """The blocks of packed text, in the order in which batches of `num_rows` rows take them.

    Items are dictionaries:
        input_ids (T,): a block; empty after the end of a row's stretch.
        position_ids (T,): restart at the start of a document.
        shift_labels (T,): the next token of the stream, also across blocks; -100 at the end of a document.
        row_starts (): bool, True where the row's memory is reset before the block's first token.
    """

    def __init__(self, blocks: PackedBlocks | Dataset, num_rows: int, eos_token_id: int):
        self.blocks, self.num_rows = blocks, num_rows
        self.eos_token_id = eos_token_id  # the last token of every document, and of documents only
        # Row b has the blocks from bounds[b] to bounds[b + 1].
        self.bounds = [int(bound) for bound in np.linspace(0, len(blocks), num_rows + 1).round()]

    @property
    def num_steps(self) -> int:
        return max(end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False))

    def __len__(self) -> int:
        return self.num_steps * self.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, row = divmod(index, self.num_rows)
        block, end = self.bounds[row] + step, self.bounds[row + 1]
        ids = self._tokens(block, end)
        labels = torch.cat([ids, self._tokens(block + 1, len(self.blocks))[:1]])[1:]
        labels = pad(labels, (0, len(ids) - len(labels)), value=IGNORED)
        ends, places = ids == self.eos_token_id, torch.arange(len(ids))
        document_starts = pad(ends, (1, 0), value=False)[:-1] * places  # (T,): the place of a first token, else 0
        starts = step == 0 or (len(ids) > 0 and self._tokens(block - 1, end)[-1].item() == self.eos_token_id)
        return {
            "input_ids": ids,
            "position_ids": places - document_starts.cummax(0).values,
            "shift_labels": labels.masked_fill(ends, IGNORED),
            "row_starts": torch.tensor(starts),
        }

    def _tokens(self, block: int, end: int) -> torch.Tensor:
        return self.blocks[block]["input_ids"] if block < end else torch.empty(0, dtype=torch.int64)


def collate_contiguous(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Joins items to a batch. The loss uses `shift_labels`; models and Trainer look for `labels`."""
    padding = {"input_ids": 0, "position_ids": 1 << 20, "shift_labels": IGNORED}  # position 0 would start a document
    batch = pad_rows(items, padding)
    return batch | {"labels": batch["shift_labels"], "row_starts": torch.stack([item["row_starts"] for item in items])}


def check_carry_memory(config: PreTrainedConfig, args: TrainingArguments, data: RunArguments) -> None:
    """Raises ValueError for options that cannot be combined with --carry_memory."""
    # One argument: gradient_checkpointing, which is activation_checkpointing from transformers 5.24 on.
    checkpointing = any(getattr(args, f"{which}_checkpointing", False) for which in ("activation", "gradient"))
    refused = {
        f"a {config.model_type} model, which has no memory": config.model_type != "titans",
        "gradient checkpointing, which would update a carried memory twice": checkpointing,
        "--auto_find_batch_size: the rows of a batch are fixed": args.auto_find_batch_size,
        "several GPUs in one process: use accelerate launch": args.n_gpu > 1,
        "--streaming: the blocks are ordered by their number": data.streaming,
        "--max_eval_blocks: blocks are evaluated one after the other": data.max_eval_blocks is not None,
    }
    for reason in [reason for reason, holds in refused.items() if holds]:
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

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Any:
        cache = self._cache(inputs.pop("row_starts"), training=True)
        result = super().compute_loss(model, {**inputs, "cache": cache}, *args, **kwargs)
        cache.detach()
        return result

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Any:
        inputs = self._prepare_inputs(inputs)
        cache = self._cache(inputs.pop("row_starts"), training=False)
        return super().prediction_step(model, {**inputs, "cache": cache}, *args, **kwargs)

    def _cache(self, row_starts: torch.Tensor, training: bool) -> TitansCache:
        """Returns the cache of the batch before; rows that start a document are reset."""
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
            with safe_globals([*PARTS_OF_A_CACHE, TitansCache]):
                self.caches[True] = torch.load(path, map_location=self.args.device, weights_only=True)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

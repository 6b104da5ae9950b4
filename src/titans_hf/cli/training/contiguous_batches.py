"""Batches for very long documents: consecutive blocks of a document in the same row of consecutive batches.

The stream of all documents is cut into as many stretches of about the same length as a batch has rows. Row b of batch t
is block t of stretch b. A stretch may start within a document; every token is in exactly one batch.
"""

import numpy as np
import torch
from datasets import Dataset
from torch.nn.functional import pad

IGNORED = -100


class ContiguousBatches(torch.utils.data.Dataset):
    """The blocks of `blocks.pack_arrays`, in the order in which batches of `num_rows` rows take them.

    Items are dictionaries:
        input_ids (T,): a block; empty after the end of a row's stretch.
        position_ids (T,): restart at the start of a document.
        shift_labels (T,): the next token of the stream, also across blocks; -100 at the end of a document.
        row_starts (): bool, True where the row's memory is reset before the block's first token.
    """

    def __init__(self, blocks: Dataset, num_rows: int, eos_token_id: int):
        self.blocks = blocks
        self.num_rows = num_rows
        self.eos_token_id = eos_token_id  # the last token of every document, and of documents only
        # the first block of every row, and one past its last
        self.bounds = [int(bound) for bound in np.linspace(0, len(blocks), num_rows + 1).round()]

    @property
    def num_steps(self) -> int:
        return max(end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False))

    def __len__(self) -> int:
        return self.num_steps * self.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, row = divmod(index, self.num_rows)
        block = self.bounds[row] + step
        if block >= self.bounds[row + 1]:
            no_tokens = torch.empty(0, dtype=torch.int64)
            return self._item(no_tokens, no_tokens, torch.tensor(step == 0))
        ids = self._tokens(block)
        row_starts = torch.tensor(step == 0 or self._tokens(block - 1)[-1].item() == self.eos_token_id)
        return self._item(ids, torch.cat([ids, self._tokens(block + 1)[:1]])[1:], row_starts)

    def _tokens(self, block: int) -> torch.Tensor:
        return self.blocks[block]["input_ids"] if block < len(self.blocks) else torch.empty(0, dtype=torch.int64)

    def _item(self, ids: torch.Tensor, following: torch.Tensor, row_starts: torch.Tensor) -> dict[str, torch.Tensor]:
        labels = torch.full_like(ids, IGNORED)
        labels[: len(following)] = following
        labels[ids == self.eos_token_id] = IGNORED
        positions = torch.arange(len(ids))
        starts = torch.where(ids == self.eos_token_id, positions + 1, 0).roll(1)
        if len(ids):
            starts[0] = 0
            positions = positions - starts.cummax(0).values
        return {"input_ids": ids, "position_ids": positions, "shift_labels": labels, "row_starts": row_starts}


def collate_contiguous(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads on the right. The loss uses `shift_labels`; `labels` are there because models and Trainer look for them."""
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    length = max(1, int(lengths.max()))  # the stretches of all rows of a process may have ended
    padding = {
        "input_ids": 0,
        "position_ids": length,
        "shift_labels": IGNORED,
    }  # a position above 0: 0 would mark a new document
    batch = {
        name: torch.stack([pad(item[name], (0, length - len(item[name])), value=value) for item in items])
        for name, value in padding.items()
    }
    batch["labels"] = batch["shift_labels"]
    batch["row_starts"] = torch.stack([item["row_starts"] for item in items])
    if (lengths < length).any():
        batch["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    return batch

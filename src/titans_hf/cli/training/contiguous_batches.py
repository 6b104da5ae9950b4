"""Batches for very long documents: consecutive blocks of a document in the same row of consecutive batches.

The stream of all documents is cut into as many stretches of about the same length as a batch has rows. Row b of batch t
is block t of stretch b. A stretch may start within a document; every token is in exactly one batch.
"""

import numpy as np
import torch
from datasets import Dataset
from torch.nn.functional import pad

from titans_hf.cli.training.data import PackedBlocks

IGNORED = -100


class ContiguousBatches(torch.utils.data.Dataset):
    """The blocks of packed text, in the order in which batches of `num_rows` rows take them.

    Items are dictionaries:
        input_ids (T,): a block; empty after the end of a row's stretch.
        position_ids (T,): restart at the start of a document.
        shift_labels (T,): the next token of the stream, also across blocks; -100 at the end of a document.
        row_starts (): bool, True where the row's memory is reset before the block's first token.
    """

    def __init__(self, blocks: PackedBlocks | Dataset, num_rows: int, eos_token_id: int):
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
    """Pads on the right. The loss uses `shift_labels`; `labels` are there because models and Trainer look for them."""
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    length = max(1, int(lengths.max()))  # the stretches of all rows of a process may have ended
    padding = {"input_ids": 0, "position_ids": length, "shift_labels": IGNORED}  # position 0 would start a document
    batch = {
        name: torch.stack([pad(item[name], (0, length - len(item[name])), value=value) for item in items])
        for name, value in padding.items()
    }
    batch["labels"] = batch["shift_labels"]
    batch["row_starts"] = torch.stack([item["row_starts"] for item in items])
    if (lengths < length).any():
        batch["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    return batch

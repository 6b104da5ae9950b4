"""Very long documents for training: consecutive blocks of a document in the same row of consecutive batches.

The stream of all documents is cut into as many stretches of about the same length as a batch has rows: the lanes. Row b
of batch t is block t of lane b. A lane may begin within a document; nothing else is torn apart, and nothing is lost.
"""

import numpy as np
import torch
from datasets import Dataset
from torch.nn.functional import pad

IGNORED = -100


class Lanes(torch.utils.data.Dataset):
    """The blocks of `training_data.cut_blocks`, in the order in which batches of `num_lanes` rows take them.

    Items: input_ids (T,) of a block, none where a lane has run out; position_ids (T,), which restart where a document
    begins; shift_labels (T,), the next token of the stream, also across blocks, but not across documents; begins,
    whether the row's memory starts anew with the block's first token.
    """

    def __init__(self, blocks: Dataset, num_lanes: int, eos_token_id: int):
        self.blocks = blocks
        self.num_lanes = num_lanes
        self.eos_token_id = eos_token_id  # ends every document and occurs nowhere else
        # the first block of every lane, and one past its last
        self.bounds = [int(bound) for bound in np.linspace(0, len(blocks), num_lanes + 1).round()]

    @property
    def num_steps(self) -> int:
        return max(end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False))

    def __len__(self) -> int:
        return self.num_steps * self.num_lanes

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, lane = divmod(index, self.num_lanes)
        block = self.bounds[lane] + step
        if block >= self.bounds[lane + 1]:
            nothing = torch.empty(0, dtype=torch.int64)
            return self._item(nothing, nothing, torch.tensor(step == 0))
        ids = self._tokens(block)
        begins = torch.tensor(step == 0 or self._tokens(block - 1)[-1].item() == self.eos_token_id)
        return self._item(ids, torch.cat([ids, self._tokens(block + 1)[:1]])[1:], begins)

    def _tokens(self, block: int) -> torch.Tensor:
        return self.blocks[block]["input_ids"] if block < len(self.blocks) else torch.empty(0, dtype=torch.int64)

    def _item(self, ids: torch.Tensor, following: torch.Tensor, begins: torch.Tensor) -> dict[str, torch.Tensor]:
        labels = torch.full_like(ids, IGNORED)
        labels[: len(following)] = following
        labels[ids == self.eos_token_id] = IGNORED
        positions = torch.arange(len(ids))
        starts = torch.where(ids == self.eos_token_id, positions + 1, 0).roll(1)
        if len(ids):
            starts[0] = 0
            positions = positions - starts.cummax(0).values
        return {"input_ids": ids, "position_ids": positions, "shift_labels": labels, "begins": begins}


def collate_lanes(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads on the right; `labels` are there because models and Trainer look for them, `shift_labels` are used."""
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    length = max(1, int(lengths.max()))  # all lanes of a process may have run out
    padding = {"input_ids": 0, "position_ids": length, "shift_labels": IGNORED}  # no position that would restart
    batch = {
        name: torch.stack([pad(item[name], (0, length - len(item[name])), value=value) for item in items])
        for name, value in padding.items()
    }
    batch["labels"] = batch["shift_labels"]
    batch["begins"] = torch.stack([item["begins"] for item in items])
    if (lengths < length).any():
        batch["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    return batch

"""The cache of a model with `remember`."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from . import files
from .texts import Texts


class MemoryCache(Texts, Cache):
    """The cache of a model with `remember`: its memory of R texts, see `Texts`. Use it as any cache of Transformers.

        cache = MemoryCache(model)
        model(ids, cache=cache)                # reads on
        model.generate(ids, cache=cache)
        branch = copy.copy(cache)              # shares all tensors: none is changed in place

    recalled: for each row, the passages that were read again since `start_prompt` or `generate()`, as `Passage`.
    first_column: the first one of the prompt, as `generate()` counts. prompt_end: in `generate()`, columns of its
    prompt by `get_seq_length`, else None. in_answer: whether that prompt was read.
    about: any JSON, saved with the memory. seen_in_folders: see `cache_files.write_memory`.

    Raises ValueError for a model without `remember`.
    """

    layer_class_to_replicate, offloading, is_compileable = None, False, False
    prompt_end: int | None = None
    in_answer = False

    def __init__(self, model: PreTrainedModel):
        Texts.__init__(self, model)
        self.about: dict[str, Any] = {}
        self.seen_in_folders: dict[Path, dict | None] = {}

    @property
    def layers(self) -> list:
        return self.rows.layers

    @property
    def seen(self) -> Tensor:
        """Tokens that each row has read plainly (R,)."""
        return self.rows.seen

    @property
    def num_tokens_seen(self) -> Tensor:
        """Tokens that each row has read (R,)."""
        return self.unread.tokens_after(self.seen)

    @property
    def batch_size(self) -> int:
        return len(self.rows) or -1

    @property
    def is_croppable(self) -> bool:
        return self.recording is not None

    @property
    def num_removable(self) -> int:
        """The columns that `crop` may remove."""
        return 0 if self.recording is None else self.recording.num_removable

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of columns read since the last `start_prompt`."""
        return self.num_columns - self.first_column

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Restores the cache if the block raises an error."""
        before = copy.copy(self)
        try:
            yield
        except BaseException:
            self.__dict__.update(before.__dict__)
            raise

    def start_prompt(self, num_read: int = 0) -> None:
        """Lets a prompt begin, by which passages are chosen: its first token is the one to read next. `generate()` then
        expects the tokens from there on; with `num_read`, also the last `num_read` that were read, and the prompt by
        which passages are chosen goes on.
        """
        if num_read > self.num_columns:
            self.num_columns = num_read
            self.restart_recording()
        self.first_column = self.num_columns - num_read
        self.recalled = [[] for _ in range(len(self.rows))]
        if not num_read:
            self.begin_prompt()

    def read_unread(self, model: PreTrainedModel) -> None:
        """Ends a recall, and reads the columns that are to be read again."""
        self.end_recall()
        if self.unread.width:
            with torch.no_grad():
                model(input_ids=self.unread.ids[:, :0], cache=self)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps rows (I,) int64, in this order."""
        if len(self.rows):
            self.select(indices.cpu())

    reorder_cache = batch_select_indices  # as beam search asks

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Lets `crop` remove columns from here on: the state at the starts of the last chunks is kept."""
        if self.recording is None:
            self.restart_recording(always=True)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last columns: -n removes n, as in Transformers.

        Raises ValueError without `activate_past_recording`, and for more columns than were recorded. At least the
        columns since the start of the last full chunk are recorded, and those of the last call; where a part of the
        rows recalled, those since then.
        """
        number = -tokens_to_remove
        if number < 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative, got {tokens_to_remove}.")
        if number and self.recording is None:
            raise ValueError(
                "`crop` needs a cache that records: call `cache.activate_past_recording()` before reading."
            )
        if number > self.num_removable:
            most = self.num_removable
            raise ValueError(f"`tokens_to_remove` must be at least -{most}, by the recorded columns, got {-number}.")
        if number:
            self.num_columns -= number
            self.rows, self.unread, recall, sees = self.recording.crop(self.num_columns)
            self.branch, self.since_recall = None, None
            known = zip(self.recalled, self.num_tokens_seen.tolist(), strict=True)
            self.recalled = [[x for x in own if x.begin + len(x.ids) <= seen] for own, seen in known]
            if recall is not None:
                self.since_recall = torch.where(sees, self.num_columns - recall, -1)

    def num_bytes(self) -> dict[str, int]:
        """Returns the bytes of "keys and values" of the window and states of recurrent layers, with those that see a
        passage, and of the "text", token ids.
        """
        layers = [*self.rows.layers, *([] if self.branch is None else self.branch.layers)]
        held = {x.data_ptr(): x.nbytes for layer in layers if hasattr(layer, "named") for x in layer.named().values()}
        return {"keys and values": sum(held.values()), "text": 0 if self.rows.text is None else self.rows.text.nbytes}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in self.num_bytes().items())
        return f"MemoryCache(tokens read {self.num_tokens_seen.tolist()}; {sizes})"

    def __copy__(self) -> "MemoryCache":
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.rows, new.branch = copy.copy(self.rows), copy.copy(self.branch)
        new.recording = copy.copy(self.recording)
        new.about, new.seen_in_folders = copy.deepcopy(self.about), dict(self.seen_in_folders)
        return new

    def __deepcopy__(self, memo: dict) -> "MemoryCache":
        new = copy.copy(self)
        new.memory = memo.get(id(self.memory), self.memory)  # of the model that is copied with it
        new.rows = self.rows.map(torch.clone)
        new.branch = None if self.branch is None else self.branch.map(torch.clone)
        return new

    def save_pretrained(
        self, folder: str | os.PathLike, model: PreTrainedModel, *, model_fingerprint: dict | None = None
    ) -> None:
        """Saves the memory in a folder, atomically. See `files.save`."""
        plain = copy.copy(self)
        plain.read_unread(model)
        plain.rows.trim()
        files.save(plain, folder, model_fingerprint or files.memory_fingerprint(model))
        self.seen_in_folders = plain.seen_in_folders

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike, model: PreTrainedModel, *, model_fingerprint: dict | None = None
    ) -> "MemoryCache":
        """Loads the memory of a folder for the model that wrote it. See `files.load`."""
        return files.load(cls(model), folder, model, model_fingerprint or files.memory_fingerprint(model))

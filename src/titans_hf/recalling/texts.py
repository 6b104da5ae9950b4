"""The texts of a batch: as they were read, as they are seen in a recall, and what is to be read again.

Shapes: R rows.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .columns import Columns
from .recording import Recording
from .rows import Rows
from .settings import memory_of
from .window import make_layers


class Passage(NamedTuple):
    """What was read again: ids (S,) int64 of a row's text, from its token number `begin` on."""

    begin: int
    ids: Tensor


class Texts:
    """R texts of a model with a memory.

    rows: the texts as they were read, without passages. branch: the rows that see passages, None without a recall.
    unread: the last columns, which `rows` has not read: they were read in the branch alone, or a crop went back behind
    them. since_recall (R,) int64: columns read since a row's recall, -1 for a row without one beside rows that have
    one; None without a recall. recalled: for each row, the passages that were read again for its prompt. num_columns:
    columns that were read, padding included. recording: None unless `crop` is wanted.

    Raises ValueError for a model without a memory.
    """

    def __init__(self, model: PreTrainedModel):
        self.memory = memory = memory_of(model)
        self.rows = Rows(make_layers(model, memory.window, memory.extra_columns), memory.passages is not None)
        self.recording: Recording | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets everything that was read."""
        self.rows, self.unread = self.rows.empty(0, "cpu"), Columns.none(0)
        self.branch: Rows | None = None
        self.since_recall: Tensor | None = None
        self.recalled: list[list[Passage]] = []
        self.num_columns = self.first_column = 0
        self.restart_recording()

    def begin(self, rows: int, device: torch.device) -> None:
        """Makes `rows` rows that have read nothing, unless there are some. Raises ValueError for another number."""
        if not len(self.rows):
            self.rows, self.unread = self.rows.empty(rows, device), Columns.none(rows)
            self.recalled = [[] for _ in range(rows)]
            self.restart_recording()
        elif len(self.rows) != rows:
            raise ValueError(f"`input_ids` must have the {len(self.rows)} rows of `cache`, got {rows}.")

    def restart_recording(self, always: bool = False) -> None:
        if always or self.recording is not None:
            recalls = torch.zeros(len(self.rows), dtype=torch.bool)
            recalls = recalls if self.since_recall is None else self.since_recall >= 0
            self.recording = Recording(self.rows, self.unread, recalls, self.num_columns)

    def begin_prompt(self) -> None:
        """Lets the tokens to read next be the prompt by which passages are chosen."""
        self.rows.asked = -self.unread.real.sum(1)
        if self.recording is not None:
            self.recording.begin_prompt()

    def end_recall(self) -> None:
        """Lets the texts go on without passages in sight, also where they are cropped."""
        self.branch, self.since_recall, self.unread = None, None, self.unread.without_recalls()
        if self.recording is not None:
            self.recording.forget_recalls()

    def note_recall(self, rows: Tensor, branch: Rows, found: dict[int, list[Passage]]) -> None:
        """Notes that rows (I,) int64 recall after the last column, and go on in `branch`; found: the passages, by the
        number of the row in `branch`.
        """
        if self.branch is None:
            self.branch, self.since_recall = self.rows.as_branch(), torch.full_like(self.rows.seen, -1)
        if len(rows) == len(self.rows):
            self.branch = branch
        else:
            self.branch.put(rows, branch)
        self.since_recall = self.since_recall.index_fill(0, rows, 0)
        new = {int(rows[i]): passages for i, passages in found.items()}
        self.recalled = [[*x, *new.get(row, [])] for row, x in enumerate(self.recalled)]
        if self.recording is not None:
            self.recording.note_recall(rows, is_read=not self.unread.width)

    def note_unread(self, columns: Columns) -> None:
        """Notes columns that were read only in the branch."""
        self.unread, self.num_columns = self.unread.join(columns), self.num_columns + columns.width
        self.since_recall = torch.where(self.since_recall < 0, -1, self.since_recall + columns.width)
        if self.recording is not None:
            self.recording.add(columns)

    def take_unread(self, begin: int = 0) -> Columns:
        """Takes the unread columns from `begin` on out of here, and returns them."""
        taken = self.unread.at(begin, self.unread.width)
        self.unread, self.num_columns = self.unread.at(0, begin), self.num_columns - taken.width
        if self.recording is not None:
            self.recording.drop(taken.width)
        return taken

    def select(self, rows: Tensor) -> None:
        """Keeps rows (I,) int64, in this order."""
        self.rows, self.unread = self.rows.take(rows), self.unread.of_rows(rows)
        self.branch = None if self.branch is None else self.branch.take(rows)
        self.since_recall = None if self.since_recall is None else self.since_recall[rows]
        self.recalled = [self.recalled[i] for i in rows.tolist()]
        if self.recording is not None:
            self.recording.take(rows)

    def append_rows(self, other: "Texts") -> None:
        """Appends the rows of another cache of the same model. Both must have read something. A cache that records can
        be cropped from here on. If only one of the caches sees passages, the other's rows go on in its branch, without
        a passage.

        Raises ValueError for another model's or an empty cache, and if one of the caches sees passages and one, cropped
        or after an answer, has columns to be read again.
        """
        if other.memory is not self.memory or not len(self.rows) or not len(other.rows):
            raise ValueError("`other` must be a cache of the same model, and both must have read something.")
        both = (self, copy.copy(other))  # it may be this one
        if any(x.since_recall is not None for x in both):
            if any(x.branch is None and x.unread.width for x in both):
                raise ValueError(
                    "`append_rows` beside a recall: call `cache.read_unread(model)` on both caches before."
                )
            branches = [x.rows.as_branch() if x.branch is None else x.branch for x in both]
            none = [torch.full_like(x.rows.seen, -1) for x in both]
            since = [y if x.since_recall is None else x.since_recall for x, y in zip(both, none, strict=True)]
            self.branch, self.since_recall = branches[0].join(branches[1]), torch.cat(since)
        self.unread, self.rows = self.unread.beside(both[1].unread), self.rows.join(both[1].rows)
        self.recalled = [*self.recalled, *both[1].recalled]
        self.restart_recording()

    def reset_rows(self, model: PreTrainedModel, rows: Tensor) -> None:
        """Lets some rows (I,) int64 begin a new text with an empty memory. Beside rows that see a passage they see none
        until their next recall. A cache that records can be cropped from here on.
        """
        if len(self.rows):
            for state in filter(None, (self.rows, self.branch)):
                state.clear(rows)
                state.asked = state.asked.index_fill(0, rows, 0)
            self.unread = self.unread._replace(real=self.unread.real.index_fill(0, rows, False))
            self.recalled = [[] if i in rows.tolist() else x for i, x in enumerate(self.recalled)]
            self.restart_recording()

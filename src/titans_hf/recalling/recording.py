"""What `MemoryCache.crop` needs: earlier states, and the columns that were read after them.

Shapes: R rows.
"""

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .columns import Columns
from .rows import Rows


class Noted(NamedTuple):
    """A state, its column, the columns that were read, or are to be read again, from there to the next one, and recalls
    (R,) bool: which rows recall right at the state.
    """

    rows: Rows
    column: int
    columns: Columns
    recalls: Tensor


class Cropped(NamedTuple):
    """The state to go on from, the columns to read again, and the last recall among them: its column, None without one,
    and which rows (R,) bool see a passage.
    """

    rows: Rows
    unread: Columns
    recall: int | None
    sees: Tensor


class Recording:
    """States of the last columns of a text, from which it can be read again.

    noted: the states, the oldest first. first: the first column that may be removed. call: the first one of the call.
    """

    def __init__(self, rows: Rows, unread: Columns, recalls: Tensor, end: int):
        """`unread`: the columns after `rows`, up to the column `end`. Rows recall there where recalls (R,) bool."""
        self.noted = [Noted(copy.copy(rows), end - unread.width, unread, recalls)]
        self.first = self.call = end

    def __copy__(self) -> "Recording":
        new = object.__new__(Recording)
        new.__dict__.update(self.__dict__, noted=list(self.noted))
        return new

    @property
    def end(self) -> int:
        return self.noted[-1].column + self.noted[-1].columns.width

    @property
    def num_removable(self) -> int:
        return self.end - max(self.noted[0].column, self.first)

    def add(self, columns: Columns) -> None:
        """Notes columns that were read, or that are to be read again."""
        last = self.noted[-1]
        self.noted[-1] = last._replace(columns=last.columns.join(columns))

    def note(self, rows: Rows, chunk: int) -> None:
        """Notes the state of rows, if `chunk` columns were read since the last one, and forgets what the last call, two
        chunks and the last recall do not need.
        """
        if self.noted[-1].columns.width >= chunk:
            nothing = Columns.none(len(rows)), torch.zeros(len(rows), dtype=torch.bool)
            self.noted.append(Noted(copy.copy(rows), self.end, *nothing))
        needed = min(self.call, self.end - 2 * chunk)
        while len(self.noted) > 2 and self.noted[1].column <= self.last_recall(needed, needed):
            del self.noted[0]

    def drop(self, number: int) -> None:
        """Takes the last columns back, which are recorded again."""
        last = self.noted[-1]
        self.noted[-1] = last._replace(columns=last.columns.at(0, last.columns.width - number))

    def note_recall(self, rows: Tensor, is_read: bool) -> None:
        """Notes that rows (I,) int64 recall after the last column; before the first, where that was not read plainly,
        because other rows go on in the branch.
        """
        last, columns = self.noted[-1], self.noted[-1].columns
        if is_read and columns.width:
            recalls = torch.cat([columns.recalls[:, :-1], columns.recalls[:, -1:].index_fill(0, rows, True)], 1)
            self.noted[-1] = last._replace(columns=columns._replace(recalls=recalls))
        else:
            self.noted[-1] = last._replace(recalls=last.recalls.index_fill(0, rows, True))

    def forget_recalls(self) -> None:
        for i, x in enumerate(self.noted):
            self.noted[i] = x._replace(columns=x.columns.without_recalls(), recalls=torch.zeros_like(x.recalls))

    def begin_prompt(self) -> None:
        """Lets the prompt of each row begin after all columns."""
        self._begin_prompt(lambda asked, number: -number)

    def _begin_prompt(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Sets `asked` of each state to a function of it and of the number of tokens (R,) that were read after it."""
        number = torch.zeros(())
        for i, x in reversed([*enumerate(self.noted)]):
            number = (number + x.columns.real.sum(1)).long()
            self.noted[i] = x._replace(rows=copy.copy(x.rows))
            self.noted[i].rows.asked = function(x.rows.asked, number)

    def take(self, rows: Tensor) -> None:
        """Keeps rows (I,) int64, in their order."""
        for i, x in enumerate(self.noted):
            self.noted[i] = Noted(x.rows.take(rows), x.column, x.columns.of_rows(rows), x.recalls[rows])

    def last_recall(self, end: int, default: int | None) -> int | None:
        """Returns after which of the columns before `end` rows last recalled."""
        points = [x.column for x in self.noted if bool(x.recalls.any())]
        for x in self.noted:
            points += (x.column + 1 + x.columns.recalls.any(0).nonzero()[:, 0]).tolist()
        return max((x for x in points if x <= end), default=default)

    def crop(self, end: int) -> Cropped:
        """Removes all columns from `end` on. What was recalled before it is recalled again. A prompt that began behind
        `end` begins there.
        """
        first = self.noted[0].column
        columns = functools.reduce(Columns.join, (x.columns for x in self.noted)).at(0, end - first)
        recall = self.last_recall(end, None)
        sees = torch.stack([columns.recalls.any(1), *(x.recalls for x in self.noted if x.column <= end)]).any(0)
        fits = [x for x in self.noted if x.column <= end and (recall is None or x.column <= recall)]
        unread = columns.at(fits[-1].column - first, end - first)
        self.noted = [*fits[:-1], fits[-1]._replace(columns=unread)]
        self._begin_prompt(lambda asked, number: torch.maximum(asked, -number))
        return Cropped(copy.copy(self.noted[-1].rows), unread, recall, sees)

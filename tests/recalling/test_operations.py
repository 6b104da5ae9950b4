"""Random programs of operations on the cache of `remember`: every row reads as it does alone."""

import copy
import functools
import random
from dataclasses import dataclass, replace
from unittest.mock import patch

import families
import pytest
import torch
from cache_programs import MAX_ROWS, RowOperations
from remember_models import SETTINGS, close, small_model

from titans_hf import MemoryCache, Passages, remember
from titans_hf.recalling import attach, reading
from titans_hf.recalling.recall import recall as recall_rows

SEEDS = [(), (), *[pytest.mark.slow] * 4, *[pytest.mark.long] * 60]
SEVERAL = replace(SETTINGS, share=0.4, most=3)  # most recalls have two or three passages


def model_of(family: str, passages: Passages | None):
    make = small_model if family == "llama" else functools.partial(families.small_model, family)
    model = remember(make(), 12, passages=None)
    model.memory = replace(model.memory, passages=passages, chunk=8)
    return model


@dataclass
class Column:
    """What a row has read in a column: a token, None for padding; whether a document starts there; `recall` before it
    ("beside": the row goes on beside rows that recall), and how many tokens had asked then; whether the row recalls
    after it, how many tokens have asked by then, since the prompt's begin; the same if a crop ends behind the column;
    and the logits after it."""

    token: int | None
    starts: bool
    recall: bool | str | None
    asked_before: int
    recalls: bool
    asked: int
    left: int
    logits: torch.Tensor


@dataclass
class Call:
    """Columns of a row that can be read by one call; `mark` is `recall` before them."""

    cache: MemoryCache
    mark: bool | str | None
    asked_before: int
    columns: list[Column]


class Program(RowOperations):
    """A cache, and the columns that each row has read since its reset; waiting: `recall` before the next column of each
    row; asked: tokens of each row's prompt; sure: columns that can be removed; ended: columns before the last recall
    that was ended."""

    def __init__(self, model, seed: int, folder, rows: int = 3):
        self.model, self.random, self.folder = model, random.Random(seed), folder
        self.cache, self.rows, self.waiting = MemoryCache(model), [[] for _ in range(rows)], [None] * rows
        self.sure, self.ended, self.lengths, self.asked = 0, 0, [0, 1, 1, 3, 8, 16, 30], [0] * rows

    def run(self) -> None:
        """Runs operations of all kinds, or short reads and crops."""
        names = "reset reorder select repeat append branch record start prompt crop file".split()
        if self.random.random() < 0.5:
            self.read(30)
            self.read(20)
            self.record()
            names, self.lengths = "reorder repeat branch prompt crop crop crop crop crop".split(), [0, 1, 2, 3, 5, 8]
        for _ in range(24):
            if self.random.random() < 0.8:
                self.read()
            operation = self.random.choice(names)
            getattr(self, operation)()
            self.count()
        self.read()
        self.check(self.rows)

    def count(self) -> None:
        """Compares the tokens that the cache says it has read, and whose passages it holds."""
        seen = []
        for row in self.rows if self.cache.batch_size > 0 else ():
            last = max((i for i, x in enumerate(row) if x.starts), default=0)
            seen.append(sum(x.token is not None for x in row[last:]))
        assert self.cache.num_tokens_seen.tolist() == seen
        for row, passages in zip(self.rows, self.cache.recalled, strict=False):
            text = [x.token for x in row if x.token is not None]
            for x in passages:
                ids = x.ids.tolist()
                assert any(text[i : i + len(ids)] == ids for i in range(len(text))) or not row

    def read(self, length: int | None = None) -> None:
        """Reads columns with padding anywhere, and recalls, ends a recall, or begins documents."""
        pick = self.random.choice
        shape, recall, chance = (len(self.rows), pick(self.lengths) if length is None else length), None, 0
        if self.model.memory.passages is not None:
            recall, chance = pick([None, None, None, True, False]), pick([0, 0, 0.1])  # of a recall after a column
        lasts = bool(recall or (recall is None and self.cache.since_recall is not None))
        chances = pick([0, 0.2, 0.9]), 0 if chance or recall else pick([0, 0.1]), chance
        draw = lambda f: torch.tensor([f() for _ in range(shape[0] * shape[1])]).view(shape).long()  # noqa: E731
        ids = draw(lambda: self.random.randrange(3, 53))
        pads, starts, recalls = (draw(lambda x=x: self.random.random() < x).bool() for x in chances)
        starts, mask = starts & ~pads & ((~pads).cumsum(1) > 1), ~pads
        self.ended = self.cache.num_columns if recall is False else self.ended
        of_call = lambda model, cache, columns, _: columns._replace(recalls=recalls)  # noqa: E731
        with torch.no_grad(), patch.object(attach, "_of_generation", of_call):
            given = {"attention_mask": mask.long(), "position_ids": 1 - starts.long(), "recall": recall}
            logits = self.model(pick([ids, ids.int()]), cache=self.cache, **given).logits
        marks, since = self.waiting if recall is None else [recall] * shape[0], 2 * self.model.memory.chunk
        for column in range(shape[1]):
            for i, row in enumerate(self.rows):
                begins, token = bool(starts[i, column]), int(ids[i, column]) if mask[i, column] else None
                before = self.asked[i]
                self.asked[i] = (0 if begins else before) + (token is not None)
                mark = lasts if begins else marks[i]
                after = self.asked[i], self.asked[i], logits[i, column]
                row.append(Column(token, begins, mark, before, bool(recalls[i, column]), *after))
            some, beside = bool(recalls[:, column].any()), None if lasts else "beside"
            marks = [(True if x else beside) if some else None for x in recalls[:, column].tolist()]
            lasts, since = lasts or some, 0 if some and not bool(recalls[:, column].all()) else since + 1
        self.waiting = marks
        self.sure = min(since, max(shape[1], min(2 * self.model.memory.chunk, self.sure + shape[1])))

    @torch.no_grad()
    def check(self, rows: list[list[Column]]) -> None:
        """Compares the logits of rows with those of their documents, each read alone by calls that recall as it did."""
        for row in rows:
            cache, mark, calls = None, (None, 0), []
            for x in row:
                mark = mark if x.recall is None else (x.recall, x.asked_before)
                if x.token is not None:
                    cache = MemoryCache(self.model) if x.starts or cache is None else cache
                    if not calls or x.starts or mark[0] is not None or calls[-1].columns[-1].recalls:
                        calls.append(Call(cache, *mark, []))
                    calls[-1].columns.append(x)
                    mark = None, 0
            beside, unread = None, []
            for call in calls:
                if call.mark is not None:
                    self.read_alone(unread)
                    beside, unread = None, []
                if call.mark == "beside":
                    call.cache.read_unread(self.model)  # a recall that was ended before
                    beside = copy.copy(call.cache)
                own, recall = (call.cache, call.mark) if beside is None else (beside, None)
                if recall:
                    own.rows.asked = torch.tensor([call.asked_before])[: len(own.rows)] - own.unread.real.sum(1)
                ids = [x.token for x in call.columns]
                alone = self.model(torch.tensor([ids]), cache=own, recall=recall).logits[0]
                unread += [] if beside is None else [(call.cache, ids)]
                if call.columns[-1].recalls:
                    branch = copy.copy(call.cache)
                    plain = self.read_alone([(branch, x) for _, x in unread])
                    branch.rows.asked = torch.tensor([call.columns[-1].asked]) - branch.unread.real.sum(1)
                    found = [*recall_rows(self.model, branch, torch.zeros(1, dtype=torch.int64))[1]]
                    alone = torch.cat([alone[:-1], *(found or plain or [alone[-1:]])])
                close(torch.stack([x.logits for x in call.columns]), alone, atol=1e-10)

    def read_alone(self, parts: list[tuple[MemoryCache, list[int]]]) -> list[torch.Tensor]:
        last = []
        for cache, ids in parts:
            last = [self.model(torch.tensor([ids]), cache=cache).logits[0, -1:]]
        return last

    def reset(self) -> None:
        """Begins rows anew. Beside rows that see a passage they begin as rows that recall before their first token."""
        rows = [i for i in range(len(self.rows)) if self.random.random() < 0.4]
        self.cache.reset_rows(self.model, torch.tensor(rows, dtype=torch.int64))
        for i in rows:
            self.check([self.rows[i]])
            self.rows[i], self.waiting[i] = [], True if self.cache.since_recall is not None else None
            self.asked[i] = 0
        self.sure = 0

    def take(self, index: list[int]) -> None:
        self.rows = [[replace(x) for x in self.rows[i]] for i in index]
        self.waiting, self.asked = [self.waiting[i] for i in index], [self.asked[i] for i in index]

    def append(self) -> None:
        if len(self.rows) < MAX_ROWS and self.cache.batch_size > 0:
            other = Program(self.model, self.random.random(), self.folder, rows=1)
            while other.cache.batch_size < 1 or self.random.random() < 0.5:
                other.read()
            both = (self, other)
            if any(x.cache.since_recall is not None for x in both) and any(
                x.cache.branch is None and x.cache.unread.width for x in both
            ):
                with pytest.raises(ValueError, match="`append_rows` beside a recall"):
                    self.cache.append_rows(other.cache)
                return
            plain = [x for x in both if x.cache.since_recall is None]
            if len(plain) == 1:
                plain[0].waiting = ["beside"] * len(plain[0].rows)
            self.cache.append_rows(other.cache)
            self.rows, self.waiting, self.sure = [*self.rows, *other.rows], [*self.waiting, *other.waiting], 0
            self.asked = [*self.asked, *other.asked]
            for operation in self.random.choice([[], [self.record, self.read, self.crop]]):
                operation()

    def record(self) -> None:
        self.sure = self.sure if self.cache.is_croppable else 0
        self.cache.activate_past_recording()

    def start(self) -> None:
        self.cache.start_prompt(self.cache.num_columns + 7)
        self.sure = 0

    def prompt(self) -> None:
        """Begins a prompt. A crop behind its first token moves that to the crop."""
        self.cache.start_prompt()
        self.asked = [0] * len(self.rows)
        for x in (x for row in self.rows for x in row):
            x.left = 0
        assert not any(self.cache.recalled)

    def crop(self) -> None:
        """Removes columns, and the recalls among them. A recall that was ended stays so."""
        if self.cache.is_croppable and self.cache.batch_size > 0:
            assert self.cache.num_removable >= self.sure
            removed = self.random.randint(0, self.cache.num_removable)
            lasted, end = self.cache.since_recall is not None, self.cache.num_columns - removed
            lasted, self.ended = lasted and end >= self.ended, min(end, self.ended)
            self.cache.crop(-removed)
            for i, row in enumerate(self.rows if removed else ()):
                self.waiting[i] = (None if row[-removed].starts else row[-removed].recall) if lasted else False
                del row[-removed:]
                self.asked[i] = row[-1].left if row else 0
            self.sure = max(0, self.sure - removed)

    def file(self) -> None:
        """Goes on with a saved memory, in which no passage is in sight."""
        if self.cache.batch_size > 0:
            self.cache.save_pretrained(self.folder, self.model)
            self.cache, self.waiting = MemoryCache.from_pretrained(self.folder, self.model), [False] * len(self.rows)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=x) for i, x in enumerate(SEEDS)])
@pytest.mark.parametrize(
    ("family", "passages"),
    [("llama", None), ("llama", SETTINGS), ("llama", SEVERAL), ("bamba", SEVERAL)],
    ids=["window alone", "one passage", "several passages", "recurrent"],
)
def test_random_programs(family, passages, seed, tmp_path, monkeypatch):
    """Each row reads as alone after reads, recalls, documents, resets, selections, copies, crops and files."""
    monkeypatch.setattr(reading, "SINK_TOKENS", 16)
    with families.as_double():
        Program(model_of(family, passages), seed, tmp_path).run()

"""Random programs of operations on the cache of `remember`: every row reads as it does alone."""

import copy
import random
from unittest.mock import patch

import families
import pytest
import torch
from cache_programs import MAX_ROWS, RowOperations
from remember_models import SETTINGS, close, remembering
from test_titans import titans

from titans_hf.remember import MemoryCache, attach, reading, remember
from titans_hf.remember import recall as recalling
from titans_hf.remember.parts import PARTS

SEEDS = [(), (), *[pytest.mark.slow] * 4, *[pytest.mark.long] * 60]


def with_parts(family: str, window: int | None = 12, memory: tuple[str, ...] = PARTS):
    if family == "llama":
        return remembering(window, memory)
    model = titans(variant="mag") if family == "mag" else families.small_model(family)
    fast, chosen = families.small_memory(model)
    return remember(model, window, memory, passages=SETTINGS, fast_weights=fast, token_list=chosen)


class Program(RowOperations):
    """A cache, and the columns that each row has read since its reset: (id, whether a document starts there, whether
    learning is on, `recall` before it, whether the row recalls after it, logits), where id is None at padding, and
    `recall` is "beside" where the row goes on beside rows that recall; waiting: `recall` before the next column of each
    row; sure: columns that can be removed; ended: columns before the last recall that was ended."""

    def __init__(self, model, seed: int, folder, rows: int = 3):
        self.model, self.random, self.folder = model, random.Random(seed), folder
        self.cache, self.rows, self.waiting = MemoryCache(model), [[] for _ in range(rows)], [None] * rows
        self.sure, self.ended, self.lengths = 0, 0, [0, 1, 1, 3, 8, 16, 30]

    def run(self) -> None:
        """Runs operations of all kinds, or short reads and crops."""
        names = "reset reorder select repeat append branch record start crop file".split()
        if self.random.random() < 0.5:
            self.read(30)
            self.read(20)
            self.record()
            names, self.lengths = "reorder repeat branch crop crop crop crop crop".split(), [0, 1, 2, 3, 5, 8]
        for _ in range(24):
            if self.random.random() < 0.8:
                self.read()
            operation = self.random.choice(names)
            getattr(self, operation)()
        self.read()
        self.check(self.rows)

    def read(self, length: int | None = None) -> None:
        """Reads columns, learning or not, with padding anywhere, and recalls, ends a recall, or begins documents."""
        pick, learning = self.random.choice, self.random.random() < 0.8
        shape, recall, chance = (len(self.rows), pick(self.lengths) if length is None else length), None, 0
        if self.model.memory.passages is not None:
            recall, chance = pick([None, None, None, True, False]), pick([0, 0, 0.1])  # of a recall after a column
        lasts = bool(recall or (recall is None and self.cache.since_recall is not None))
        cannot_start = chance or (lasts and (recall or (learning and self.model.memory.fast_weights is not None)))
        chances = pick([0, 0.2, 0.9]), 0 if cannot_start else pick([0, 0.1]), chance
        draw = lambda f: torch.tensor([f() for _ in range(shape[0] * shape[1])]).view(shape).long()  # noqa: E731
        ids = draw(lambda: self.random.randrange(3, 53))
        pads, starts, recalls = (draw(lambda x=x: self.random.random() < x).bool() for x in chances)
        starts, mask = starts & ~pads & ((~pads).cumsum(1) > 1), ~pads
        self.model.set_memory_learning(learning)
        self.ended = self.cache.num_columns if recall is False else self.ended
        of_call = lambda model, cache, columns, _: columns._replace(recalls=recalls)  # noqa: E731
        with torch.no_grad(), patch.object(attach, "_of_generation", of_call):
            given = {"attention_mask": mask.long(), "position_ids": 1 - starts.long(), "recall": recall}
            logits = self.model(pick([ids, ids.int()]), cache=self.cache, **given).logits
        marks, since = self.waiting if recall is None else [recall] * shape[0], 2 * self.model.memory.chunk
        for column in range(shape[1]):
            for i, row in enumerate(self.rows):
                begins, id_ = bool(starts[i, column]), int(ids[i, column]) if mask[i, column] else None
                mark = lasts if begins else marks[i]
                row.append((id_, begins, learning, mark, bool(recalls[i, column]), logits[i, column]))
            some, beside = bool(recalls[:, column].any()), None if lasts else "beside"
            marks = [(True if x else beside) if some else None for x in recalls[:, column].tolist()]
            lasts, since = lasts or some, 0 if some and not bool(recalls[:, column].all()) else since + 1
        self.waiting = marks
        self.sure = min(since, max(shape[1], min(2 * self.model.memory.chunk, self.sure + shape[1])))

    @torch.no_grad()
    def check(self, rows: list[list]) -> None:
        """Compares the logits of rows with those of their documents, each read alone by calls that recall as it did."""
        for row in rows:
            cache, mark, calls = None, None, []
            for id_, starts, learning, recall, recalls, logits in row:
                mark = mark if recall is None else recall
                if id_ is not None:
                    cache = MemoryCache(self.model) if starts or cache is None else cache
                    if not calls or starts or mark is not None or learning != calls[-1][1] or calls[-1][3]:
                        calls.append([cache, learning, mark, False, [], []])
                    calls[-1][3] = recalls
                    calls[-1][4].append(id_)
                    calls[-1][5].append(logits)
                    mark = None
            beside, unread = None, []
            for cache, learning, recall, recalls, ids, logits in calls:
                if recall is not None:
                    self.read_alone(unread)
                    beside, unread = None, []
                if recall == "beside":
                    cache.read_unread(self.model)  # a recall that was ended before
                    beside = copy.copy(cache)
                self.model.set_memory_learning(learning and beside is None)
                own, recall = (cache, recall) if beside is None else (beside, None)
                alone = self.model(torch.tensor([ids]), cache=own, recall=recall).logits[0]
                unread += [] if beside is None else [(cache, ids, learning)]
                if recalls:
                    branch = copy.copy(cache)
                    plain = self.read_alone([(branch, *x[1:]) for x in unread])
                    found = [*recalling.recall(self.model, branch, torch.zeros(1, dtype=torch.int64))[1]]
                    alone = torch.cat([alone[:-1], *(found or plain or [alone[-1:]])])
                close(torch.stack(logits), alone, atol=1e-10)

    def read_alone(self, parts: list[tuple[MemoryCache, list[int], bool]]) -> list[torch.Tensor]:
        last = []
        for cache, ids, learning in parts:
            self.model.set_memory_learning(learning)
            last = [self.model(torch.tensor([ids]), cache=cache).logits[0, -1:]]
        return last

    def reset(self) -> None:
        """Begins rows anew. Beside rows that see a passage they begin as rows that recall before their first token."""
        rows = [i for i in range(len(self.rows)) if self.random.random() < 0.4]
        self.cache.reset_rows(self.model, torch.tensor(rows, dtype=torch.int64))
        for i in rows:
            self.check([self.rows[i]])
            self.rows[i], self.waiting[i] = [], True if self.cache.since_recall is not None else None
        self.sure = 0

    def take(self, index: list[int]) -> None:
        super().take(index)
        self.waiting = [self.waiting[i] for i in index]

    def append(self) -> None:
        if len(self.rows) < MAX_ROWS and self.cache.batch_size > 0:
            other = Program(self.model, self.random.random(), self.folder, rows=1)
            while other.cache.batch_size < 1 or self.random.random() < 0.5:
                other.read()
            if self.cache.since_recall is not None and self.cache.branch is None:
                with pytest.raises(ValueError, match="read a token before"):
                    self.cache.append_rows(other.cache)
                return
            plain = [x for x in (self, other) if x.cache.since_recall is None]
            if len(plain) == 1:
                plain[0].waiting = ["beside"] * len(plain[0].rows)
            self.cache.append_rows(other.cache)
            self.rows, self.waiting, self.sure = [*self.rows, *other.rows], [*self.waiting, *other.waiting], 0
            for operation in self.random.choice([[], [self.record, self.read, self.crop]]):
                operation()

    def record(self) -> None:
        self.sure = self.sure if self.cache.is_croppable else 0
        self.cache.activate_past_recording()

    def start(self) -> None:
        self.cache.start_prompt(self.cache.num_columns + self.random.choice([0, 7]))
        self.sure = 0

    def crop(self) -> None:
        """Removes columns, and the recalls among them. A recall that was ended stays so."""
        if self.cache.recorded:
            assert self.cache.num_removable >= self.sure
            removed = self.random.randint(0, self.cache.num_removable)
            lasted, end = self.cache.since_recall is not None, self.cache.num_columns - removed
            lasted, self.ended = lasted and end >= self.ended, min(end, self.ended)
            self.cache.crop(-removed)
            for i, row in enumerate(self.rows if removed else ()):
                self.waiting[i] = (None if row[-removed][1] else row[-removed][3]) if lasted else False
                del row[-removed:]
            self.sure = max(0, self.sure - removed)

    def file(self) -> None:
        """Goes on with a saved memory, in which no passage is in sight."""
        if self.cache.batch_size > 0:
            self.cache.save_pretrained(self.folder, self.model)
            self.cache, self.waiting = MemoryCache.from_pretrained(self.folder, self.model), [False] * len(self.rows)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=x) for i, x in enumerate(SEEDS)])
@pytest.mark.parametrize(
    ("family", "window", "memory"),
    [
        ("llama", 12, PARTS),
        ("llama", None, PARTS),
        ("llama", 12, ("passages",)),
        ("bamba", 12, PARTS),
        ("mag", None, PARTS),
    ],
)
def test_random_programs(family, window, memory, seed, tmp_path, monkeypatch):
    """Each row reads as alone after reads, recalls, documents, resets, selections, copies, crops and files."""
    monkeypatch.setattr(reading, "SINK_TOKENS", 16)
    with families.as_double():
        Program(with_parts(family, window, memory), seed, tmp_path).run()

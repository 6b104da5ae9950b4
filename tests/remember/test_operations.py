"""Random programs of operations on the cache of `remember`: every row reads as it does alone."""

import random

import families
import pytest
import torch
from cache_programs import MAX_ROWS, RowOperations
from remember_models import SETTINGS, close, remembering

from titans_hf.remember import MemoryCache, reading, remember
from titans_hf.remember.parts import PARTS

NUM_OPERATIONS = 24
SEEDS = [(), (), *[pytest.mark.slow] * 4, *[pytest.mark.long] * 60]


def recalling(family: str, window: int | None = 12, memory: tuple[str, ...] = PARTS):
    if family == "llama":
        return remembering(window, memory)
    model = families.small_model(family)
    fast, chosen = families.small_memory(model)
    return remember(model, window, memory, passages=SETTINGS, fast_weights=fast, token_list=chosen)


class Program(RowOperations):
    """A cache, and the columns that each row has read since its reset: (id, whether a document starts there, whether
    learning is on, `recall` before it, logits), where id is None at padding; waiting: `recall` before the next column
    of each row; num_removable: columns since recording began, of which `sure` are recorded; ended: columns before the
    last recall that was ended."""

    def __init__(self, model, seed: int, folder):
        self.model, self.random, self.folder = model, random.Random(seed), folder
        self.cache, self.rows, self.waiting = MemoryCache(model), [[], [], []], [None] * 3
        self.num_removable, self.sure, self.ended, self.lengths = 0, 0, 0, [0, 1, 1, 3, 8, 16, 30]

    def run(self) -> None:
        """Runs operations of all kinds, or short reads and crops."""
        names = "reset reorder select repeat append branch record start crop file".split()
        if self.random.random() < 0.5:
            self.read(30)
            self.read(20)
            self.record()
            names, self.lengths = "reorder repeat branch crop crop crop crop crop".split(), [0, 1, 2, 3, 5, 8]
        for _ in range(NUM_OPERATIONS):
            if self.random.random() < 0.8:
                self.read()
            operation = self.random.choice(names)
            print(operation, [len(x) for x in self.rows], self.num_removable, self.cache.since_recall)  # if it fails
            getattr(self, operation)()
        self.read()
        self.check(self.rows)

    def read(self, length: int | None = None) -> None:
        """Reads columns, learning or not, with padding anywhere, and recalls, ends a recall, or begins documents."""
        shape = len(self.rows), self.random.choice(self.lengths) if length is None else length
        recall = self.random.choice([None, None, None, True, False]) if self.model.memory.passages else None
        learning = self.random.random() < 0.8
        lasts = recall or (recall is None and self.cache.since_recall is not None)
        cannot_start = lasts and (recall or (learning and self.model.memory.fast_weights is not None))
        chances = self.random.choice([0, 0.2, 0.9]), 0 if cannot_start else self.random.choice([0, 0.1])
        draw = lambda f: torch.tensor([f() for _ in range(shape[0] * shape[1])]).view(shape).long()  # noqa: E731
        ids = draw(lambda: self.random.randrange(3, 53))
        pads, starts = (draw(lambda x=x: self.random.random() < x).bool() for x in chances)
        starts, mask = starts & ~pads & ((~pads).cumsum(1) > 1), ~pads
        self.model.set_memory_learning(learning)
        self.ended = self.cache.num_columns if recall is False else self.ended
        with torch.no_grad():
            given = {"attention_mask": mask.long(), "position_ids": 1 - starts.long(), "recall": recall}
            logits = self.model(self.random.choice([ids, ids.int()]), cache=self.cache, **given).logits
        for i, row in enumerate(self.rows):
            mark = self.waiting[i] if recall is None else recall
            for column in range(shape[1]):
                begins, id_ = bool(starts[i, column]), int(ids[i, column]) if mask[i, column] else None
                row.append((id_, begins, learning, lasts if begins else mark, logits[i, column]))
                mark = None
            self.waiting[i] = mark
        self.num_removable += shape[1]
        self.sure = max(shape[1], min(2 * self.model.memory.chunk, self.sure + shape[1]))

    @torch.no_grad()
    def check(self, rows: list[list]) -> None:
        """Compares the logits of rows with those of their documents, each read alone by calls that recall as it did."""
        for row in rows:
            cache, mark, calls = None, None, []
            for id_, starts, learning, recall, logits in row:
                mark = mark if recall is None else recall
                if id_ is not None:
                    cache = MemoryCache(self.model) if starts or cache is None else cache
                    if not calls or starts or mark is not None or learning != calls[-1][1]:
                        calls.append((cache, learning, mark, [], []))
                    calls[-1][3].append(id_)
                    calls[-1][4].append(logits)
                    mark = None
            for cache, learning, recall, ids, logits in calls:
                self.model.set_memory_learning(learning)
                alone = self.model(torch.tensor([ids]), cache=cache, recall=recall).logits[0]
                close(torch.stack(logits), alone, atol=1e-10)

    def reset(self) -> None:
        """Begins rows anew. Beside rows that see a passage they begin as rows that recall before their first token."""
        rows = [i for i in range(len(self.rows)) if self.random.random() < 0.4]
        self.cache.reset_rows(self.model, torch.tensor(rows, dtype=torch.int64))
        for i in rows:
            self.check([self.rows[i]])
            self.rows[i], self.waiting[i] = [], True if self.cache.since_recall is not None else None
        self.num_removable = 0

    def take(self, index: list[int]) -> None:
        super().take(index)
        self.waiting = [self.waiting[i] for i in index]

    def append(self) -> None:
        """Appends a row that has read alone, and sees a passage if the others do."""
        if len(self.rows) < MAX_ROWS and self.cache.batch_size > 0:
            other, lasts = Program(self.model, self.random.random(), self.folder), self.cache.since_recall is not None
            other.rows, other.waiting = [[]], [None]
            while other.cache.batch_size < 1 or (other.cache.since_recall is not None) != lasts:
                other.read()
            if lasts and self.cache.branch is None:
                with pytest.raises(ValueError, match="read a token after `crop`"):
                    self.cache.append_rows(other.cache)
                return
            self.cache.append_rows(other.cache)
            self.rows, self.waiting = [*self.rows, *other.rows], [*self.waiting, *other.waiting]
            self.num_removable = 0

    def record(self) -> None:
        self.num_removable = self.num_removable if self.cache.is_croppable else 0
        self.cache.activate_past_recording()

    def start(self) -> None:
        """Lets a prompt begin earlier than what was read."""
        self.cache.start_prompt(self.cache.num_columns + self.random.choice([0, 7]))
        self.num_removable = 0

    def crop(self) -> None:
        """Removes columns, and the recalls among them. A recall that was ended stays so."""
        if self.cache.recorded:
            most = min(self.num_removable, self.cache.num_columns - self.cache.recorded[0].cache.num_columns)
            assert most >= min(self.sure, self.num_removable)
            removed = self.random.randint(0, most)
            lasted, end = self.cache.since_recall is not None, self.cache.num_columns - removed
            lasted, self.ended = lasted and end >= self.ended, min(end, self.ended)
            self.cache.crop(-removed)
            for i, row in enumerate(self.rows if removed else ()):
                self.waiting[i] = row[-removed][3] if lasted else False
                del row[-removed:]
            self.num_removable, self.sure = self.num_removable - removed, max(0, self.sure - removed)

    def file(self) -> None:
        """Goes on with a saved memory, in which no passage is in sight."""
        if self.cache.batch_size > 0:
            self.cache.save_pretrained(self.folder, self.model)
            self.cache = MemoryCache.from_pretrained(self.folder, self.model)
            self.waiting = [False] * len(self.rows)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=x) for i, x in enumerate(SEEDS)])
@pytest.mark.parametrize(
    ("family", "window", "memory"),
    [("llama", 12, PARTS), ("llama", None, PARTS), ("llama", 12, ("passages",)), ("bamba", 12, PARTS)],
)
def test_random_programs(family, window, memory, seed, tmp_path, monkeypatch):
    """Each row reads as alone after reads, recalls, documents, resets, selections, copies, crops and files."""
    monkeypatch.setattr(reading, "SINK_TOKENS", 16)
    with families.as_double():
        Program(recalling(family, window, memory), seed, tmp_path).run()

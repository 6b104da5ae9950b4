"""Random programs of cache operations, and threads that generate: every row equals a plain forward pass of it alone."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cache_programs import MAX_ROWS, RowOperations
from common import FORMS, PAPER, VARIANTS, assert_same, full_logits, make_ids, make_model, read

from titans_hf import TitansCache

NUM_OPERATIONS = 14
SEEDS = [(), *[pytest.mark.slow] * 2, *[pytest.mark.long] * 9]
CHANGES = {"": {}, "+delta": FORMS["delta"], "+paper": PAPER}


class Program(RowOperations):
    """A cache and the columns it should have read: per row since its reset, (id, starts a document, is learned), or
    None at padding; and of these the number that crop() can remove, unless it removed some since the last read."""

    def __init__(self, variant: str, changes: str, seed: int, folder):
        self.folder, self.random = folder, random.Random(f"{variant}{changes} {seed}")
        self.model = make_model(variant, attention=self.random.choice(["sdpa", "eager"]), **CHANGES[changes])
        self.cache = TitansCache(self.model.config, compileable=self.random.random() < 0.5)
        self.rows: list[list] = [[] for _ in range(self.random.randint(1, 3))]
        self.recording, self.num_columns, self.num_removable, self.was_cropped = False, 0, 0, False

    def run(self) -> None:
        names = "reset reorder select repeat append branch record crop file".split()
        self.read()
        for _ in range(NUM_OPERATIONS):
            operation = self.read if self.random.random() < 0.4 else getattr(self, self.random.choice(names))
            print(operation.__name__, len(self.rows), self.recording, self.num_removable)  # shown if it fails
            operation()
            self.check_counts()
        self.read()

    def read(self) -> None:
        """Reads random columns, learning or not, with padding and documents, each told in one of two ways."""
        if self.random.random() < 0.3:
            self.model.set_memory_learning(not self.model.memory_learning)
        num_columns = self.random.choice([1, 1, 2, 5, 9, 14])
        padding, documents = self.random.choice([0, 0.3, 0.9]), self.random.choice([0, 0, 0.2])
        ids = torch.tensor([[self.random.randrange(50) for _ in range(num_columns)] for _ in self.rows])
        mask = torch.tensor([[int(self.random.random() >= padding) for _ in range(num_columns)] for _ in self.rows])
        seq_idx = torch.tensor([[self.random.random() < documents for _ in range(num_columns)] for _ in self.rows])
        seq_idx, positions = seq_idx.cumsum(1), torch.zeros_like(ids)
        for i, row in enumerate(self.rows):
            previous = None
            for column in range(num_columns):
                if mask[i, column]:
                    starts = previous is not None and seq_idx[i, column] != seq_idx[i, previous]
                    if previous is not None and not starts:
                        positions[i, column] = positions[i, previous] + 1
                    previous = column
                    row.append((int(ids[i, column]), bool(starts), self.model.memory_learning))
                else:
                    row.append(None)
        told = self.random.choice([{"seq_idx": seq_idx}, {"position_ids": positions}])
        whole = torch.cat([torch.ones(len(self.rows), self.num_columns, dtype=torch.long), mask], dim=1)
        given = self.random.choice([mask, whole])
        with torch.no_grad():
            logits = self.model(ids, given, cache=self.cache, **told).logits
        self.num_columns += num_columns
        for ours, row in zip(logits, self.rows, strict=True):
            self.check_logits(ours, row, num_columns)
        self.num_removable = num_columns + (0 if self.was_cropped else self.num_removable) if self.recording else 0
        self.was_cropped = False

    def check_logits(self, logits: torch.Tensor, row: list, num_columns: int) -> None:
        """Compares the logits of the last columns of a row with those of each of its documents alone."""
        documents: list[list] = [[]]
        for at, column in enumerate(row):
            if column is not None:
                if column[1]:
                    documents.append([])
                documents[-1].append((column[0], column[2], at - (len(row) - num_columns)))
        for document in documents:
            new = [(i, at) for i, (_, _, at) in enumerate(document) if at >= 0]
            if new:
                alone = self.alone(document)
                assert_same(logits[[at for _, at in new]], alone[[i for i, _ in new]], 1e-9)

    def alone(self, document: list) -> torch.Tensor:
        """Returns the logits of a document, in one call unless learning was turned on or off within."""
        if all(learned for _, learned, _ in document):
            return full_logits(self.model, torch.tensor([[token for token, _, _ in document]]))[0]
        learning, cache, logits = self.model.memory_learning, TitansCache(self.model.config), []
        for learned, run in itertools.groupby(document, key=lambda x: x[1]):
            self.model.set_memory_learning(learned)
            logits.append(read(self.model, torch.tensor([[token for token, _, _ in run]]), None, cache)[0][0])
        self.model.set_memory_learning(learning)
        return torch.cat(logits)

    def check_counts(self) -> None:
        """Checks the columns, and the tokens of each row's document where no columns have to be read again."""
        assert {int(self.cache.get_seq_length(layer)) for layer in (0, 1)} == {self.num_columns}
        if self.cache.batch_size == -1 or self.cache.columns_to_reread() is not None:
            return
        counts = []
        for row in self.rows:
            tokens = [column for column in row if column is not None]
            starts = [i for i, (_, start, _) in enumerate(tokens) if start]
            counts.append(len(tokens) - (starts[-1] if starts else 0))
        assert self.cache.num_tokens_seen.tolist() == counts

    def reset(self) -> None:
        if self.recording:
            with pytest.raises(RuntimeError, match="cannot be undone"):
                self.cache.reset(torch.ones(len(self.rows), dtype=torch.bool))
        elif self.random.random() < 0.3:
            self.cache.reset()
            self.rows, self.num_columns = [[] for _ in self.rows], 0
        else:
            rows = [self.random.random() < 0.4 for _ in self.rows]
            self.cache.reset(torch.tensor(rows))
            self.rows = [[] if reset else row for row, reset in zip(self.rows, rows, strict=True)]

    def selection(self, index: list[int]) -> torch.Tensor:
        mask = torch.zeros(len(self.rows), dtype=torch.bool)
        mask[index] = True
        return self.random.choice([mask, torch.tensor(index)])

    def append(self) -> None:
        """Appends a row that has read some tokens alone, where nothing can be undone."""
        full = len(self.rows) == MAX_ROWS or self.cache.batch_size == -1
        if not full and not self.recording and self.cache.columns_to_reread() is None:
            ids, other = make_ids(1, self.random.choice([1, 7, 20])), TitansCache(self.model.config)
            with torch.no_grad():
                self.model(ids, cache=other)
            self.cache.append_rows(other)
            self.rows.append([(int(token), False, self.model.memory_learning) for token in ids[0]])

    def record(self) -> None:
        """Starts recording, or stops it, which a crop postpones to the next token."""
        if not self.recording:
            self.cache.activate_past_recording()
        elif self.cache.columns_to_reread() is not None:
            with pytest.raises(RuntimeError, match="read on first"):
                self.cache.stop_past_recording()
            return
        else:
            self.cache.stop_past_recording()
            self.num_removable = 0
        self.recording = not self.recording

    def crop(self) -> None:
        removed = self.random.randint(0, self.num_removable)
        self.cache.crop(-removed)
        if removed:
            self.rows, self.num_columns = [row[: len(row) - removed] for row in self.rows], self.num_columns - removed
            self.num_removable, self.was_cropped = self.num_removable - removed, True
        elif not self.was_cropped:
            self.num_removable = 0

    def file(self) -> None:
        if self.cache.batch_size == -1:
            return
        self.cache.save_pretrained(self.folder, self.model)
        compileable = self.random.random() < 0.5
        self.cache = TitansCache.from_pretrained(self.folder, self.model, compileable=compileable)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=x) for i, x in enumerate(SEEDS)])
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_programs(variant, changes, seed, tmp_path):
    """Every row has its own logits after reads, documents, resets, selections, copies, crops and files in any order."""
    Program(variant, changes, seed, tmp_path).run()


@pytest.mark.parametrize("variant", ["mag", *(pytest.param(x, marks=pytest.mark.slow) for x in ("mac", "mal", "lmm"))])
def test_four_threads_generate(variant):
    """Threads that share a model and its starting memory generate what each does alone, in every mode."""
    model = make_model(variant)
    model.start_from(read(model, make_ids(1, 21))[1])
    modes = [{}, dict(num_beams=3), dict(prompt_lookup_num_tokens=3), dict(prefill_chunk_size=4)]
    start = threading.Barrier(4)

    def generate(i):
        ids = make_ids(1, 9 + i, seed=i).repeat(1, 2)
        return model.generate(ids, max_new_tokens=12, pad_token_id=0, do_sample=False, **modes[i % 4])

    def work(part):
        start.wait()
        return [generate(i) for i in range(part, 10, 4)]

    alone = list(map(generate, range(10)))
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(work, range(4)))
    assert all(torch.equal(together[i % 4][i // 4], sequences) for i, sequences in enumerate(alone))
    assert not model._forward_hooks

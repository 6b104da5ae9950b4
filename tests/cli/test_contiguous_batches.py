"""cli/training/carried_memory.py: documents distributed over the rows of consecutive batches."""

import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from titans_hf.cli.training.carried_memory import IGNORED, ContiguousBatches, collate_contiguous

EOS = 1


def make_batches(lengths: list[int], block_length: int, num_rows: int) -> tuple[list[int], ContiguousBatches]:
    """Documents of these lengths, eos included: the stream of distinct tokens, and its batches."""
    stream = [token for i, length in enumerate(lengths) for token in [*range(100 * i + 2, 100 * i + length + 1), EOS]]
    rows = [stream[i : i + block_length] for i in range(0, len(stream), block_length)]
    return stream, ContiguousBatches(Dataset.from_dict({"input_ids": rows}).with_format("torch"), num_rows, EOS)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(2, 9), st.integers(1, 7))
def test_batches_hold_the_stream(lengths, block_length, num_rows):
    """Every token occurs once and in order. The rows differ by one block at most."""
    stream, batches = make_batches(lengths, block_length, num_rows)
    assert batches.num_steps == -(-len(batches.blocks) // num_rows)
    items = [batches[i] for i in range(len(batches))]
    read = [items[row::num_rows] for row in range(num_rows)]  # every row's items, in order
    assert max(len(item["input_ids"]) for item in items[-num_rows:]) > 0  # no batch without a token
    assert [token for row in read for item in row for token in item["input_ids"].tolist()] == stream

    place = 0  # in the stream
    for row in read:
        for step, item in enumerate(row):
            ids, positions, labels = (item[name].tolist() for name in ("input_ids", "position_ids", "shift_labels"))
            first = stream[place - 1 : place] in ([], [EOS])
            assert item["row_starts"] == (step == 0 or (len(ids) > 0 and first))
            for i, token in enumerate(ids):
                assert positions[i] == (0 if i == 0 or ids[i - 1] == EOS else positions[i - 1] + 1)
                last = token == EOS or place + i + 1 == len(stream)
                assert labels[i] == (IGNORED if last else stream[place + i + 1])
            place += len(ids)


def test_batches_are_padded():
    """Padding is on the right, masked, and starts no document; rows that have all ended are one column of padding.
    Equal rows have no mask.
    """
    _, batches = make_batches([3, 9], 5, 2)  # blocks of 5 and 5 in one row, of 2 in the other
    batch = collate_contiguous([batches[0], batches[1]])
    assert batch["input_ids"].tolist() == [[2, 3, EOS, 102, 103], [109, EOS, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
    assert batch["shift_labels"].tolist() == [[3, EOS, IGNORED, 103, 104], [EOS] + [IGNORED] * 4]
    assert torch.equal(batch["labels"], batch["shift_labels"]) and batch["position_ids"][1].diff().min() >= 0
    rested = collate_contiguous([batches[3]])
    assert rested["attention_mask"].tolist() == [[0]] and rested["labels"].tolist() == [[IGNORED]]
    _, even = make_batches([10], 5, 2)
    assert "attention_mask" not in collate_contiguous([even[0], even[1]])

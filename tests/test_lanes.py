"""scripts/lanes.py: documents dealt out to the rows of consecutive batches."""

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import IGNORED, Lanes, collate_lanes

EOS = 1


def make_lanes(lengths: list[int], block_length: int, num_lanes: int) -> tuple[list[int], Lanes]:
    """Documents of such lengths, eos included, as a stream of distinct tokens, and its lanes."""
    stream = [token for i, length in enumerate(lengths) for token in [*range(100 * i + 2, 100 * i + length + 1), EOS]]
    rows = [stream[i : i + block_length] for i in range(0, len(stream), block_length)]
    return stream, Lanes(Dataset.from_dict({"input_ids": rows}).with_format("torch"), num_lanes, EOS)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(2, 9), st.integers(1, 7))
def test_lanes_hold_the_stream(lengths, block_length, num_lanes):
    """Else text is lost, read twice or in another order, or a document starts where none does."""
    stream, lanes = make_lanes(lengths, block_length, num_lanes)
    items = [lanes[i] for i in range(len(lanes))]
    read = [items[lane::num_lanes] for lane in range(num_lanes)]  # every lane's items, in order
    assert max(len(item["input_ids"]) for item in items[-num_lanes:]) > 0  # no batch without a token
    assert [token for lane in read for item in lane for token in item["input_ids"].tolist()] == stream

    place = 0  # in the stream
    for lane in read:
        for step, item in enumerate(lane):
            ids, positions, labels = (item[name].tolist() for name in ("input_ids", "position_ids", "shift_labels"))
            first = stream[place - 1 : place] in ([], [EOS])
            assert item["begins"] == (step == 0 or (len(ids) > 0 and first))
            for i, token in enumerate(ids):
                assert positions[i] == (0 if i == 0 or ids[i - 1] == EOS else positions[i - 1] + 1)
                last = token == EOS or place + i + 1 == len(stream)
                assert labels[i] == (IGNORED if last else stream[place + i + 1])
            place += len(ids)


def test_batches_are_padded_on_the_right():
    """Else padding is read or predicted, or looks like the beginning of a document."""
    _, lanes = make_lanes([3, 9], 5, 2)  # blocks of 5 and 5 in one lane, of 2 in the other
    first, second = (collate_lanes([lanes[i], lanes[i + 1]]) for i in (0, 2))
    assert first["input_ids"].tolist() == [[2, 3, EOS, 102, 103], [109, EOS, 0, 0, 0]]
    assert first["attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
    assert first["shift_labels"].tolist() == [[3, EOS, IGNORED, 103, 104], [EOS] + [IGNORED] * 4]
    assert first["position_ids"][0].tolist() == [0, 1, 2, 0, 1]
    assert first["position_ids"][1].diff().min() >= 0
    assert first["begins"].tolist() == [True, True]
    assert second["input_ids"].tolist() == [[104, 105, 106, 107, 108], [0] * 5]
    assert second["attention_mask"].tolist() == [[1] * 5, [0] * 5]
    assert second["shift_labels"].tolist() == [[105, 106, 107, 108, 109], [IGNORED] * 5]
    assert second["begins"].tolist() == [False, False]
    assert all(torch.equal(batch["labels"], batch["shift_labels"]) for batch in (first, second))

    rested = collate_lanes([lanes[3]])
    assert rested["attention_mask"].tolist() == [[0]] and rested["labels"].tolist() == [[IGNORED]]

    _, even = make_lanes([10], 5, 2)
    assert "attention_mask" not in collate_lanes([even[0], even[1]])


@pytest.mark.parametrize("num_blocks,num_lanes", [(10, 4), (3, 8), (64, 7)])
def test_lanes_are_of_about_the_same_length(num_blocks, num_lanes):
    """Else most rows of the last batches are empty."""
    _, lanes = make_lanes([5 * num_blocks], 5, num_lanes)
    assert lanes.num_steps == -(-num_blocks // num_lanes)

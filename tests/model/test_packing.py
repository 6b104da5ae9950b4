"""Packed documents: each has the logits it has alone, for every way to mark where documents start."""

import pytest
import torch
from common import (
    ATTENTIONS,
    TWO_VARIANTS,
    VARIANTS,
    assert_same,
    assert_same_cache,
    full_logits,
    make_ids,
    make_model,
    read,
    shared_model,
)
from covering import covering
from transformers import DataCollatorWithFlattening

from titans_hf import TitansCache

LENGTHS = (9, 1, 30, 4, 17, 1, 1)  # of the documents: shorter and longer than chunks, segments and windows


def documents(lengths=LENGTHS) -> list[torch.Tensor]:
    return [make_ids(length, seed=length + 7 * i) for i, length in enumerate(lengths)]


def positions_of(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.arange(len(row)) for row in rows])[None]


def ways_to_say(rows: list[torch.Tensor]) -> dict[str, dict]:
    lengths = torch.tensor([len(row) for row in rows])
    cumulative = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {
        "positions": dict(position_ids=positions_of(rows)),
        "cumulative lengths": dict(cu_seq_lens_q=cumulative, max_length_q=int(lengths.max())),
        "indices": dict(seq_idx=torch.arange(len(rows)).repeat_interleave(lengths)[None].int()),
    }


@covering(1, {"variant": VARIANTS, "way": ["positions", "cumulative lengths", "indices"]})
def test_documents_are_what_they_are_alone(variant, way):
    """Each packed document has the logits it has alone."""
    model, rows = shared_model(variant), documents()
    logits = full_logits(model, torch.cat(rows)[None], **ways_to_say(rows)[way])[0]
    for row, ours in zip(rows, logits.split([len(row) for row in rows]), strict=True):
        assert_same(ours, full_logits(model, row[None])[0])


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_the_collator_of_transformers(variant):
    """Batches of DataCollatorWithFlattening give each document's own logits."""
    model, rows = shared_model(variant), documents()
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collator([{"input_ids": row.tolist()} for row in rows])
    with torch.no_grad():
        logits = model(**batch).logits[0]
    for row, ours in zip(rows, logits.split([len(row) for row in rows]), strict=True):
        assert_same(ours, full_logits(model, row[None])[0])


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_rows_of_different_documents_and_padding(variant):
    """Document boundaries and padding apply to their own row alone."""
    model = shared_model(variant)
    parts = [documents((9, 12)), documents((3, 1, 20))]  # 21 and 24 tokens, in 28 columns
    ids, positions, mask = (torch.zeros(2, 28, dtype=torch.long) for _ in range(3))
    places = [[2, 14], [0, 4, 6]]
    for b, (rows, starts) in enumerate(zip(parts, places, strict=True)):
        for row, start in zip(rows, starts, strict=True):
            columns = slice(start, start + len(row))
            ids[b, columns], positions[b, columns], mask[b, columns] = row, torch.arange(len(row)), 1
    logits = full_logits(model, ids, mask, position_ids=positions)
    for b, (rows, starts) in enumerate(zip(parts, places, strict=True)):
        for row, start in zip(rows, starts, strict=True):
            assert_same(logits[b, start : start + len(row)], full_logits(model, row[None])[0])


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_reading_on_after_packed_documents(variant):
    """A packed call continues the cache's document and leaves it with each row's last one."""
    model, (first, second, third, more) = shared_model(variant), documents((13, 18, 11, 9))
    cache = read(model, first[None])[1]
    with torch.no_grad():
        ids, positions = torch.cat([second, third])[None], positions_of([second, third])
        logits = model(ids, position_ids=positions, cache=cache).logits[0]
    assert_same(logits[:18], full_logits(model, torch.cat([first, second])[None])[0, 13:])
    assert_same(logits[18:], full_logits(model, third[None])[0])
    assert cache.get_seq_length() == 42
    assert_same_cache(cache, read(model, third[None], None, TitansCache(model.config))[1])
    assert_same(read(model, more[None], [1, 8], cache)[0], full_logits(model, torch.cat([third, more])[None])[:, 11:])


@covering(1, {"variant": ATTENTIONS, "checkpointing": [False, True]})
def test_gradients(variant, checkpointing):
    """Gradients of packed documents equal the sum of each document's."""
    packed, alone = make_model(variant), make_model(variant)
    rows = documents()
    ids = torch.cat(rows)[None]
    directions = torch.randn(ids.shape[1], 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    packed.train()
    if checkpointing:
        packed.activation_checkpointing_enable()
    (packed(ids, position_ids=positions_of(rows), use_cache=False).logits[0] * directions).sum().backward()
    for row, direction in zip(rows, directions.split([len(row) for row in rows]), strict=True):
        (alone(row[None], use_cache=False).logits[0] * direction).sum().backward()
    for (name, ours), theirs in zip(packed.named_parameters(), alone.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad, 1e-9 * max(1.0, theirs.grad.abs().max().item())), name


def test_attention_weights_stay_within_documents():
    """Recorded attention weights of packed documents equal each document's own."""
    for variant in ("mac", "mag", "mal"):
        model, rows = shared_model(variant, attention="eager"), documents()
        with torch.no_grad():
            arguments = dict(position_ids=positions_of(rows), output_attentions=True)
            packed = model(torch.cat(rows)[None], **arguments).attentions
            for layer in range(2):
                parts = packed[layer].split([len(row) for row in rows], dim=2)
                for row, ours in zip(rows, parts, strict=True):
                    assert_same(ours, model(row[None], output_attentions=True).attentions[layer])

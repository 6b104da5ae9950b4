"""Packed documents: each has the logits it has alone, for every way to mark where documents start."""

import torch
from common import ATTENTIONS, PAPER, VARIANTS, assert_same, full_logits, make_ids, make_model, shared_model
from covering import covering
from transformers import DataCollatorWithFlattening

LENGTHS = (9, 1, 30, 4, 17, 1, 1)  # of the documents: shorter and longer than chunks, segments and windows


def documents(lengths=LENGTHS) -> list[torch.Tensor]:
    return [make_ids(length, seed=length + 7 * i) for i, length in enumerate(lengths)]


def positions_of(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.arange(len(row)) for row in rows])[None]


def ways_to_say(rows: list[torch.Tensor]) -> dict[str, dict]:
    lengths = torch.tensor([len(row) for row in rows])
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collator([{"input_ids": row.tolist()} for row in rows])
    cumulative = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {
        "positions": dict(position_ids=positions_of(rows)),
        "cumulative lengths": dict(cu_seq_lens_q=cumulative, max_length_q=int(lengths.max())),
        "indices": dict(seq_idx=torch.arange(len(rows)).repeat_interleave(lengths)[None].int()),
        "all, as Transformers' collator": {name: x for name, x in batch.items() if name != "input_ids"},
    }


@covering(1, {"variant": VARIANTS, "way": ways_to_say(documents())})
def test_documents_are_what_they_are_alone(variant, way):
    """Each packed document has the logits it has alone."""
    model, rows = shared_model(variant), documents()
    logits = full_logits(model, torch.cat(rows)[None], **ways_to_say(rows)[way])[0]
    for row, ours in zip(rows, logits.split([len(row) for row in rows]), strict=True):
        assert_same(ours, full_logits(model, row[None])[0])


@covering(2, {"variant": ATTENTIONS, "checkpointing": [False, True], "changes": [{}, PAPER]})
def test_gradients(variant, checkpointing, changes):
    """Gradients of packed documents equal the sum of each document's."""
    packed, alone = (make_model(variant, **changes) for _ in range(2))
    ids = torch.cat(rows := documents())[None]
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

"""torch.compile and torch.export: the same numbers, in one graph, compiled once however long the context grows.

With the "eager" backend: what is tested is that the model can be captured, not the code that a compiler makes of it.
"""

import copy

import pytest
import torch
from common import (
    VARIANTS,
    assert_same,
    assert_same_cache,
    full_logits,
    left_pad,
    make_ids,
    make_model,
    read,
    shared_model,
)
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig
from transformers.exporters import DynamoConfig, DynamoExporter

from titans_hf import TitansCache, memory_ops


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def read_rows_out_of_step(variant):
    """A model, and what it has read: 21 tokens in one row and 10 in the other."""
    model, (ids, mask) = shared_model(variant), left_pad([make_ids(21, seed=1), make_ids(10, seed=2)])
    cache = TitansCache(model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return model, cache


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoding_step_is_one_graph_compiled_once(variant):
    """Else decoding compiles again and again as the context grows, or breaks into many graphs; rows out of step."""
    model, cache = read_rows_out_of_step(variant)
    later = make_ids(2, 30, seed=3)
    with torch.no_grad():
        plain = copy.deepcopy(cache)
        counter = CompileCounter()
        step = torch.compile(model.forward, fullgraph=True, backend=counter)
        for token in later.split(1, 1):
            ours = step(input_ids=token, past_key_values=cache).logits
            assert_same(ours, model(input_ids=token, past_key_values=plain).logits)
    assert counter.frame_count <= 2  # the count of columns is a constant once, then a variable
    assert cache.get_seq_length() == 51


@pytest.mark.parametrize("variant", VARIANTS)
def test_generate_compiles_the_step(variant):
    """Else `cache_implementation="static"` compiles nothing, or a step that depends on the context's length."""
    model, (ids, mask) = make_model(variant), left_pad([make_ids(19, seed=1), make_ids(6, seed=2)])
    settings = dict(attention_mask=mask, max_new_tokens=25, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **settings)
    compiled = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiled._compile_all_devices = True
    answer = model.generate(ids, cache_implementation="static", compile_config=compiled, **settings)
    assert torch.equal(answer, expected)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_with_a_growing_mask(variant):
    """Else a user's compiled loop, with the mask of all columns, is wrong at padding or compiles for every length."""
    model, ids = shared_model(variant), make_ids(3, 40)
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[:, 9] = True
    cache = read(model, ids[:, :1])[1]
    cache.reset()
    counter = CompileCounter()
    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    with torch.no_grad():
        model(ids[:, :10], attention_mask=mask[:, :10], past_key_values=cache)
        logits = [
            step(input_ids=ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache).logits
            for t in range(10, 40)
        ]
    expected = full_logits(model, ids, mask)[:, 10:]
    assert_same(torch.cat(logits, 1)[mask[:, 10:]], expected[mask[:, 10:]])
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_forward(variant, padded):
    """Else a compiled Trainer learns something else: loss and gradients, whole rows or padded ones."""
    model, plain = (make_model(variant, num_hidden_layers=1).train() for _ in range(2))
    ids, mask = left_pad([make_ids(18, seed=1), make_ids(11, seed=2)])
    labels = ids.masked_fill(mask == 0, -100)
    arguments = dict(attention_mask=mask, labels=labels) if padded else dict(labels=ids)
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, use_cache=False, **arguments).loss
    expected = plain(ids, use_cache=False, **arguments).loss
    assert_same(loss, expected)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad, 1e-9 * max(1.0, theirs.grad.abs().max().item()))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_compiled_piece_goes_on_from_the_cache(variant):
    """Else prefill in pieces cannot be compiled: rows anywhere in their chunk, segment and window."""
    model, cache = read_rows_out_of_step(variant)
    later = make_ids(2, 22, seed=3)
    with torch.no_grad():
        expected = model(later, past_key_values=copy.deepcopy(cache)).logits
        piece = torch.compile(model.forward, fullgraph=True, backend="eager")
        assert_same(torch.cat([piece(x, past_key_values=cache).logits for x in later.split(11, 1)], 1), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_are_refused_when_compiled(variant):
    """Else a compiled call lets packed documents read each other."""
    model, ids = shared_model(variant), make_ids(1, 12)
    forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_same(forward(ids, position_ids=torch.arange(12)[None]).logits, full_logits(model, ids))
        with pytest.raises(RuntimeError, match="Packed documents"):
            forward(ids, position_ids=(torch.arange(12) % 7)[None])


def losses_and_gradients(model, lengths):
    results = []
    for length in lengths:
        ids = make_ids(2, length, seed=length)
        loss = model(ids, labels=ids, use_cache=False).loss
        results += [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    return results


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_compiled_memory_compiles_no_length(variant, monkeypatch):
    """Else what is compiled is something else, or every new length waits for a compiler: two graphs for two lengths, of
    which a chunk is no divisor.
    """
    model, lengths = make_model(variant), (21, 33)
    plain = losses_and_gradients(model, lengths)
    monkeypatch.setattr(memory_ops, "_compiled", None)
    counter = CompileCounter()
    model.compile_memory(backend=counter, fullgraph=True)
    compiled = losses_and_gradients(model, lengths[:1])
    graphs = counter.frame_count
    compiled += losses_and_gradients(model, lengths[1:])
    assert_same(compiled, plain)
    assert graphs == counter.frame_count > 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_export(variant):
    """Else the forward pass cannot be exported: the exported program gives the same logits, padded or not."""
    model, (ids, mask) = shared_model(variant), left_pad([make_ids(18, seed=1), make_ids(11, seed=2)])
    with torch.no_grad():
        for arguments in (dict(input_ids=ids), dict(input_ids=ids, attention_mask=mask)):
            program = torch.export.export(model, (), {**arguments, "use_cache": False}, strict=False)
            exported = program.module()(**arguments, use_cache=False).logits
            expected = full_logits(model, ids, arguments.get("attention_mask"))
            kept = mask.bool() if "attention_mask" in arguments else torch.ones_like(mask).bool()
            assert_same(exported[kept], expected[kept])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_export_of_the_decoding_step(variant, dynamic):
    """Transformers' exporter captures a step with its cache, for one batch size or any: else a model can be exported
    only without its memory. The program gives the logits and the states of the step.
    """
    model, cache = read_rows_out_of_step(variant)
    arguments = dict(input_ids=make_ids(2, 1, seed=3), past_key_values=cache, use_cache=True)
    exported = DynamoExporter().export(model, copy.deepcopy(arguments), DynamoConfig(dynamic=dynamic))
    with torch.no_grad():
        ours, expected = exported(**copy.deepcopy(arguments)), model(**arguments)
    assert_same(ours.logits, expected.logits)
    assert_same_cache(ours.past_key_values, expected.past_key_values)

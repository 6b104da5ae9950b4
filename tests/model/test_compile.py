"""torch.compile and torch.export: the same numbers, in one graph, compiled once however long the context grows.

With the "eager" backend: what is tested is that the model can be captured, not the code that a compiler makes of it.
"""

import copy

import pytest
import torch
from common import (
    ATTENTIONS,
    PAPER,
    TWO_VARIANTS,
    VARIANTS,
    assert_same,
    assert_same_cache,
    full_logits,
    left_pad,
    make_ids,
    make_model,
    shared_model,
)
from covering import covering
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, GenerationConfig
from transformers.exporters import DynamoConfig, DynamoExporter
from transformers.exporters.utils import decompose_prefill_decode

from titans_hf import TitansCache, memory_ops


def forget_compiled_code():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    forget_compiled_code()
    yield
    torch._dynamo.reset()


def read_rows_out_of_step(variant, compileable=False):
    """Returns a model and a cache with 21 tokens in one row and 10 in the other, so that their chunks differ in
    phase.
    """
    model, (ids, mask) = shared_model(variant), left_pad([make_ids(21, seed=1), make_ids(10, seed=2)])
    cache = TitansCache(model.config, compileable=compileable)
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
    return model, cache


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoding_step_is_one_graph_compiled_once(variant):
    """A compiled step is one graph, compiled at most twice, with the same logits."""
    model, cache = read_rows_out_of_step(variant)
    later = make_ids(2, 30, seed=3)
    with torch.no_grad():
        plain = copy.deepcopy(cache)
        counter = CompileCounter()
        step = torch.compile(model.forward, fullgraph=True, backend=counter)
        for token in later.split(1, 1):
            ours = step(input_ids=token, cache=cache).logits
            assert_same(ours, model(input_ids=token, cache=plain).logits)
    assert counter.frame_count <= 2  # the count of columns is a constant once, then a variable
    assert cache.get_seq_length() == 51


def generate_compiled(model, ids, dynamic, **settings):
    """Generates with a step compiled as one graph, as on an accelerator."""
    compiled = CompileConfig(fullgraph=True, backend="eager", mode=None, dynamic=dynamic)
    compiled._compile_all_devices = True
    return model.generate(ids, cache_implementation="static", compile_config=compiled, **settings)


@covering(1, {"variant": ATTENTIONS, "dynamic": [None, False]})
def test_generate_compiles_the_step(variant, dynamic):
    """`cache_implementation="static"` compiles one step for all lengths and prompts, with the same tokens."""
    model = make_model(variant)
    assert model._can_compile_fullgraph  # else Transformers' own tests of compiled steps are skipped
    for lengths in ((19, 6), (19,)):  # one row: a dimension of size 1 may have any stride
        forget_compiled_code()
        for seed in (1, 5):
            ids, mask = left_pad([make_ids(length, seed=seed) for length in lengths])
            settings = dict(attention_mask=mask, max_new_tokens=15, do_sample=False, pad_token_id=0)
            assert torch.equal(generate_compiled(model, ids, dynamic, **settings), model.generate(ids, **settings))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_outputs_of_a_compiled_step(variant):
    """A compiled step returns the plain logits, hidden states and attention maps, from embeddings too."""
    model = make_model(variant, attention="eager")
    settings = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    settings |= dict(output_logits=True, output_hidden_states=True, output_attentions=variant != "lmm")
    inputs = dict(inputs_embeds=model.get_input_embeddings()(make_ids(2, 9)).detach())
    ours, expected = generate_compiled(model, None, False, **inputs, **settings), model.generate(**inputs, **settings)
    assert_same(ours.logits, expected.logits)
    for name in ("hidden_states", "attentions") if variant != "lmm" else ("hidden_states",):
        for step, plain in zip(ours[name], expected[name], strict=True):
            assert_same(step, plain)


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_a_compileable_cache_is_like_any_other(variant, tmp_path):
    """A compileable cache counts its columns in a branch, after a crop, a reset and from a file as others do, with any
    mask.
    """
    model, ids = shared_model(variant), make_ids(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :3] = mask[1, 20:24] = 0
    cache = TitansCache(model.config, compileable=True)
    with torch.no_grad():
        model(ids[:, :9], attention_mask=mask[:, :9], cache=cache)
        branch = copy.copy(cache)
        branch.activate_past_recording()
        model(ids[:, 9:25], attention_mask=mask[:, :25], cache=branch)
        assert (cache.get_seq_length(), branch.get_seq_length()) == (9, 25)
        branch.crop(-14)
        branch.save_pretrained(tmp_path, model)
        loaded = TitansCache.from_pretrained(tmp_path, model, compileable=True)
        assert loaded.get_seq_length() == 11 and loaded.is_initialized
        logits = model(ids[:, 11:], attention_mask=mask, cache=loaded).logits
        with pytest.raises(ValueError, match="with the 30 columns read before"):
            model(ids[:, :1], attention_mask=mask, cache=loaded)
    expected = full_logits(model, ids, mask)[:, 11:]
    assert_same(logits[mask[:, 11:] == 1], expected[mask[:, 11:] == 1])
    loaded.reset()
    assert loaded.get_seq_length() == 0 and not loaded.is_initialized


@covering(1, {"variant": TWO_VARIANTS, "compileable": [False, True]})
def test_a_step_with_a_growing_mask(variant, compileable):
    """A compiled step with the mask of all columns gives the plain logits."""
    model, ids = shared_model(variant), make_ids(3, 40)
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[:, 9] = True
    cache = TitansCache(model.config, compileable=compileable)
    counter = CompileCounter()
    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    with torch.no_grad():
        model(ids[:, :10], attention_mask=mask[:, :10], cache=cache)
        logits = [
            step(input_ids=ids[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache).logits
            for t in range(10, 40)
        ]
    expected = full_logits(model, ids, mask)[:, 10:]
    assert_same(torch.cat(logits, 1)[mask[:, 10:]], expected[mask[:, 10:]])
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "padded", [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("variant,changes", [*((variant, {}) for variant in VARIANTS), ("mag", PAPER)])
def test_training_forward(variant, changes, padded):
    """Loss and gradients of the compiled model equal the plain ones, padded or not."""
    model, plain = (make_model(variant, num_hidden_layers=1, **changes).train() for _ in range(2))
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
    """A compiled call of several tokens gives the plain logits from any cache."""
    model, cache = read_rows_out_of_step(variant)
    later = make_ids(2, 22, seed=3)
    with torch.no_grad():
        expected = model(later, cache=copy.deepcopy(cache)).logits
        piece = torch.compile(model.forward, fullgraph=True, backend="eager")
        assert_same(torch.cat([piece(x, cache=cache).logits for x in later.split(11, 1)], 1), expected)


def test_packed_documents_are_refused_when_compiled():
    """Packed documents raise an error when compiled."""
    model, ids = shared_model("mag"), make_ids(1, 12)
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


@pytest.mark.parametrize("variant", ["mac", "mag"])
def test_a_compiled_memory_compiles_no_length(variant, monkeypatch):
    """compile_memory() keeps loss and gradients, and a new length adds no graph."""
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
    """The exported program gives the same logits, padded or not."""
    model, (ids, mask) = shared_model(variant), left_pad([make_ids(18, seed=1), make_ids(11, seed=2)])
    with torch.no_grad():
        for arguments in (dict(input_ids=ids), dict(input_ids=ids, attention_mask=mask)):
            program = torch.export.export(model, (), {**arguments, "use_cache": False}, strict=False)
            exported = program.module()(**arguments, use_cache=False).logits
            expected = full_logits(model, ids, arguments.get("attention_mask"))
            kept = mask.bool() if "attention_mask" in arguments else torch.ones_like(mask).bool()
            assert_same(exported[kept], expected[kept])


def test_export_of_texts_of_any_length():
    """Transformers' exporter captures the reading of a text for any length, which the number of chunks depends on."""
    model, ids = make_model("lmm", num_hidden_layers=1), make_ids(2, 18, seed=1)
    arguments = dict(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    program = DynamoExporter().export(model, dict(arguments), DynamoConfig(dynamic=True))
    with torch.no_grad():
        assert_same(program(**arguments).logits, full_logits(model, ids))


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_a_captured_step_of_several_tokens(variant):
    """A step of two tokens that Transformers' exporter captures, with a static cache after a padded prompt, is what the
    model reads in two calls. If it failed, the exporter could not capture a step of any number of tokens.
    """
    model, (ids, mask) = make_model(variant, eos_token_id=1), left_pad([make_ids(18, seed=1), make_ids(11, seed=2)])
    options = GenerationConfig(cache_implementation="static", max_cache_len=40, pad_token_id=0, eos_token_id=1)
    inputs = dict(input_ids=ids, attention_mask=mask)
    captured = decompose_prefill_decode(model, inputs, generation_config=options, multi_token_decode=True)
    _, step = captured["decode"]
    with torch.no_grad():
        together = model(**step).logits
        cache = TitansCache(model.config)
        model(input_ids=ids, attention_mask=mask, cache=cache)
        apart = [model(input_ids=token, cache=cache).logits for token in step["input_ids"].split(1, dim=1)]
    assert together.shape[1] == 2
    assert_same(together, torch.cat(apart, dim=1))


@covering(1, {"variant": ATTENTIONS, "dynamic": [False, True]})
def test_export_of_the_decoding_step(variant, dynamic):
    """Transformers' exporter captures a step with its cache, for one batch size or any, and the program continues from
    its own cache with the same logits and states.
    """
    model, cache = read_rows_out_of_step(variant, compileable=True)
    first, *later = make_ids(2, 4, seed=3).split(1, dim=1)
    arguments = dict(input_ids=first, cache=cache, use_cache=True)
    step = DynamoExporter().export(model, copy.deepcopy(arguments), DynamoConfig(dynamic=dynamic))
    exported = copy.deepcopy(cache)
    with torch.no_grad():
        for token in (first, *later):
            ours = step(input_ids=token, cache=exported, use_cache=True)
            exported = ours.cache
            assert_same(ours.logits, model(token, cache=cache).logits)
    assert_same_cache(exported, cache)
    assert exported.get_seq_length() == 25

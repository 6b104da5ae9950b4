"""torch.compile and torch.export: the same numbers, in one graph, compiled once however long the context grows.

With the "eager" backend: what is tested is that the model can be captured, not the code that a compiler makes of it.
"""

import copy

import pytest
import torch
from common import (
    ATTENTIONS,
    PAPER,
    VARIANTS,
    assert_same,
    assert_same_cache,
    assert_same_gradients,
    full_logits,
    gradients,
    left_pad,
    make_ids,
    make_model,
    shared_model,
)
from covering import covering
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig
from transformers.exporters import DynamoConfig, DynamoExporter
from transformers.exporters.utils import decompose_prefill_decode

from titans_hf import TitansCache


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()


def read_rows_out_of_step(variant, compileable=False):
    """Returns a model and a cache with 21 tokens in one row and 10 in the other, out of phase."""
    model, (ids, mask) = shared_model(variant), left_pad([make_ids(21, seed=1), make_ids(10, seed=2)])
    cache = TitansCache(model.config, compileable=compileable)
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
    return model, cache


@covering(
    2,
    {
        "variant": VARIANTS,
        "compileable": [False, True],
        "masked": [False, True],
        "size": [1, pytest.param(11, marks=pytest.mark.slow)],
    },
)
def test_a_decoding_step_is_one_graph_compiled_once(variant, compileable, masked, size):
    """A compiled step is one graph with the plain logits, masked or not; one of one token is compiled twice at most."""
    model, cache = read_rows_out_of_step(variant, compileable)
    later, mask = make_ids(2, 33, seed=3), torch.ones(2, 54, dtype=torch.long)
    mask[:, 21:] = torch.rand(2, 33, generator=torch.Generator().manual_seed(0)) < 0.7
    plain, end = copy.deepcopy(cache), 21
    counter = CompileCounter()
    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    for tokens in later.split(size, 1):
        end += size
        given = mask[:, :end] if masked else None
        real = mask[:, end - size : end] == 1 if masked else torch.ones_like(tokens).bool()
        with torch.no_grad():
            ours = step(input_ids=tokens, attention_mask=given, cache=cache).logits
            assert_same(ours[real], model(tokens, given, cache=plain).logits[real])
    assert size > 1 or counter.frame_count <= 2  # the count of columns is a constant once, then a variable
    assert cache.get_seq_length() == 54


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
        torch._dynamo.reset()
        graphs = counters["stats"]["unique_graphs"]
        for seed in (1, 5):
            ids, mask = left_pad([make_ids(length, seed=seed) for length in lengths])
            settings = dict(attention_mask=mask, max_new_tokens=15, do_sample=False, pad_token_id=0)
            assert torch.equal(generate_compiled(model, ids, dynamic, **settings), model.generate(ids, **settings))
        assert counters["stats"]["unique_graphs"] == graphs + 1


@pytest.mark.slow
@pytest.mark.parametrize("variant,changes", [*((variant, {}) for variant in VARIANTS), ("mag", PAPER)])
def test_training_forward(variant, changes):
    """Loss and gradients of the compiled model equal the plain ones, with padding."""
    model, plain = (make_model(variant, num_hidden_layers=1, **changes).train() for _ in range(2))
    ids, mask = left_pad([make_ids(18, seed=1), make_ids(11, seed=2)])
    labels = ids.masked_fill(mask == 0, -100)
    arguments = dict(attention_mask=mask, labels=labels, use_cache=False)
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, **arguments).loss
    expected = plain(ids, **arguments).loss
    assert_same(loss, expected)
    loss.backward()
    expected.backward()
    assert_same_gradients(gradients(model), gradients(plain))


def test_packed_documents_are_refused_when_compiled():
    """Packed documents raise an error when compiled."""
    model, ids = shared_model("mag"), make_ids(1, 12)
    forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_same(forward(ids, position_ids=torch.arange(12)[None]).logits, full_logits(model, ids))
        with pytest.raises(RuntimeError, match="Packed documents"):
            forward(ids, position_ids=(torch.arange(12) % 7)[None])


@pytest.mark.parametrize(
    "variant,dynamic", [("lmm", True), *(pytest.param(x, False, marks=pytest.mark.slow) for x in VARIANTS)]
)
def test_export_of_a_text(variant, dynamic):
    """Transformers' exporter captures the reading of padded texts, of one length or any, with the same logits."""
    model, lengths = make_model(variant, num_hidden_layers=1), (18, 18) if dynamic else (18, 11)
    ids, mask = left_pad([make_ids(length, seed=length) for length in lengths])
    arguments = dict(input_ids=ids, attention_mask=mask, use_cache=False)
    program = DynamoExporter().export(model, dict(arguments), DynamoConfig(dynamic=dynamic))
    with torch.no_grad():
        assert_same(program(**arguments).logits[mask == 1], full_logits(model, ids, mask)[mask == 1])


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_a_captured_step_of_several_tokens(variant):
    """A captured step of two tokens, with a static cache after a padded prompt, is what two calls read."""
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
    """Transformers' exporter captures a step with its cache, and the program continues from its own cache."""
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

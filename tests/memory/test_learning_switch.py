"""`model.set_memory_learning`: reading without learning, in every variant and form, and turning it on again."""

import copy

import pytest
import torch
from common import assert_same, assert_same_cache, full_logits, gradients, make_ids, make_model, read

from titans_hf import TitansCache

# In MAC with segments of a chunk, the anchor is also the copy of the weights at the segment's start.
CASES = [
    ("mac", dict(memory_chunk_size=8)),
    ("mag", dict(memory_form="delta")),
    ("mal", dict(memory_depth=2, memory_update_rule="delta", memory_momentum=True)),
    ("lmm", dict(memory_recurrence="paper", memory_network="residual", memory_momentum=True)),
]


def read_switching(model, ids, sizes, learning, cache=None) -> tuple[torch.Tensor, TitansCache]:
    """Reads `ids` in calls of the given sizes, each with learning on or off."""
    cache, logits, begin = TitansCache(model.config) if cache is None else cache, [], 0
    for size, on in zip(sizes, learning, strict=True):
        model.set_memory_learning(on)
        logits.append(read(model, ids[:, begin : begin + size], None, cache)[0])
        begin += size
    model.set_memory_learning(True)
    return torch.cat(logits, 1), cache


def memory_tensors(cache):
    """Returns all weights and momenta of a cache."""
    memories = [layer.state.memory for layer in cache.layers]
    return [x for memory in memories for x in (*memory.weights, *memory.momentum)]


@pytest.mark.parametrize(("variant", "changes"), CASES)
def test_reading_without_learning(variant, changes):
    """While learning is off, weights and momentum stay, and calls of any size give the logits of one call."""
    model, ids = make_model(variant, **changes), make_ids(2, 41)
    _, cache = read(model, ids[:, :13])  # not a multiple of a chunk
    before, branch = memory_tensors(cache), copy.copy(cache)
    whole, _ = read_switching(model, ids[:, 13:], [23, 5], [False, True], cache)
    pieces, after = read_switching(model, ids[:, 13:36], [1, 1, 9, 8, 3, 1], [False] * 6, branch)
    assert all(map(torch.equal, memory_tensors(after), before)) and after.num_tokens_seen.tolist() == [36, 36]
    end, after = read_switching(model, ids[:, 36:], [1, 4], [True, True], after)
    assert_same(torch.cat([pieces, end], 1), whole)
    assert_same_cache(after, cache)
    learned = read(model, ids)[0][:, 13:]
    assert (learned - whole).abs().max() > 1e-4  # the switch matters
    assert not all(map(torch.equal, memory_tensors(after), before))


@pytest.mark.parametrize(("variant", "changes"), CASES)
def test_it_is_a_memory_without_steps(variant, changes):
    """A sequence read with learning off has the logits and gradients of `memory_max_lr=0`; those of gates are 0."""
    model = make_model(variant, num_persistent_tokens=0, **changes)
    zero = make_model(variant, num_persistent_tokens=0, **changes, memory_max_lr=0)
    zero.load_state_dict(model.state_dict())
    model.set_memory_learning(False)
    ids, found = make_ids(2, 21), []
    for x in (model, zero):
        output = x(ids, labels=ids, use_cache=False)
        output.loss.backward()
        found.append((output.logits, gradients(x)))
    assert_same(found[0][0], found[1][0], 0)
    assert None not in found[0][1].values()
    assert_same(found[0][1], found[1][1], 1e-12)


def test_surprise_while_learning_is_off():
    """theta, eta and alpha are 0, and the surprise is that of the memory as it is, in calls of any size."""
    for changes in (dict(memory_momentum=True), dict(memory_form="delta")):
        model, ids = make_model("mag", **changes), make_ids(1, 20)
        model.set_memory_learning(False)
        whole = model(ids, output_surprise=True).surprise
        cache = TitansCache(model.config)
        parts = [model(x, cache=cache, output_surprise=True).surprise for x in ids.split([3, 1, 16], 1)]
        for layer, all_tokens in enumerate(whole):
            assert not all_tokens.inner_lr.any() and not all_tokens.momentum_decay.any()
            assert not all_tokens.forget.any() and all_tokens.gradient_norm.max() > 0
            assert_same(torch.cat([x[layer].gradient_norm for x in parts], -1), all_tokens.gradient_norm)


def test_gradient_checkpointing_keeps_the_switch_of_the_call():
    """Turning learning on before the backward leaves the gradients as they are."""
    model, ids = make_model("mag"), make_ids(2, 21)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.train().activation_checkpointing_enable()
        model.zero_grad()
        model.set_memory_learning(False)
        loss = model(ids, labels=ids, use_cache=False).loss
        model.set_memory_learning(True)
        loss.backward()
        found.append(gradients(model))
    assert_same(*found, 1e-12)


def test_a_compiled_model_follows_the_switch():
    """A compiled step is compiled again for the other setting."""
    model, ids = make_model("lmm", num_hidden_layers=1, num_persistent_tokens=0), make_ids(1, 3)
    compiled = torch.compile(model, backend="eager")
    for learning in (True, False):
        model.set_memory_learning(learning)
        assert_same(compiled(ids, use_cache=False).logits.detach(), full_logits(model, ids))


def test_the_switch_is_of_the_object(tmp_path):
    """The switch can be read, is shared by a model and its parts, refuses other values, and is not saved."""
    model = make_model("lmm")
    model.set_memory_learning(False)
    assert model.memory_learning is False and model.model.memory_learning is False
    assert copy.deepcopy(model).memory_learning is False and make_model("lmm").memory_learning is True
    with pytest.raises(ValueError, match=r"`learning` must be True or False, but is 'off'\."):
        model.set_memory_learning("off")
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).memory_learning is True

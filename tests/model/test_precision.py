"""Half precision: finite, near float32, and with a memory in float32."""

import itertools

import pytest
import torch
from common import ATTENTIONS, TWO_VARIANTS, VARIANTS, assert_same, full_logits, make_ids, make_model, read
from covering import covering
from transformers import AutoModelForCausalLM

from titans_hf import TitansCache

HALVES = {torch.bfloat16: 0.1, torch.float16: 0.013}  # and how far from float32, as a share of the logits' spread
LENGTH = 67  # beyond five windows, eight segments and sixteen chunks


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.isfinite().all()
    return ((actual.float() - expected).std() / expected.std()).item()


def memory_dtypes(cache: TitansCache) -> set[torch.dtype]:
    states = [(layer.state.memory, layer.state.segment_weights) for layer in cache.layers]
    return {x.dtype for m, others in states for x in (*m.weights, *m.momentum, *m.anchor, *others)}


@covering(2, {"variant": ATTENTIONS, "dtype": HALVES, "saved": [False, True]})
def test_inference(variant, dtype, saved, tmp_path):
    """Logits in half precision are near float32's and the memory is float32, however the model is converted."""
    model, ids = make_model(variant, dtype=torch.float32), make_ids(2, LENGTH)
    expected = full_logits(model, ids)
    if saved:
        model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype) if saved else model.to(dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}  # one dtype: FSDP2 shards no layer that mixes two
    assert distance(full_logits(model, ids), expected) < HALVES[dtype]
    for pieces in ([LENGTH], [1] * LENGTH, [30, 1, 36]):
        logits, cache = read(model, ids, pieces)
        assert logits.dtype == dtype
        assert distance(logits, expected) < HALVES[dtype]
        assert distance(logits[:, -10:], expected[:, -10:]) < 1.5 * HALVES[dtype]
        assert memory_dtypes(cache) == {torch.float32}
        assert {layer.state.conv_state.dtype for layer in cache.layers} == {dtype}


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-7), (torch.float32, 3e-5)])
def test_positions_of_millions(dtype, tolerance):
    """Keys are rotated to their position in the text, also behind 5 million tokens."""
    changes = dict(memory_max_lr=0, rope_parameters={"partial_rotary_factor": 1.0})
    model, ids = make_model("mag", dtype=dtype, **changes), make_ids(1, 80)
    expected = full_logits(model, ids)[:, 40:]
    for sizes in ([79], [1] * 79):
        cache = read(model, ids[:, :1])[1]
        for layer in cache.layers:  # as after 5 million tokens, but for the one in the window
            layer.state.memory.num_seen = layer.state.memory.num_seen + 5_000_000
        logits = read(model, ids[:, 1:], sizes, cache)[0]
        assert_same(logits[:, 39:], expected, tolerance)


@covering(
    1,
    {
        "variant,attention": list(itertools.product(VARIANTS, ["sdpa", "eager"])),
        "first,then": list(itertools.permutations([torch.float32, *HALVES], 2)),
        "autocast": [False, True],
    },
)
def test_cache_of_another_precision(variant, first, then, attention, autocast):
    """A cache can be read on with in another precision of the model or of autocast, near float32's logits."""
    model, ids = make_model(variant, dtype=torch.float32, attention=attention), make_ids(2, LENGTH)
    expected, cache = full_logits(model, ids), None
    for dtype, part, sizes in ((first, ids[:, :31], [31]), (then, ids[:, 31:], [1, 20, 15])):
        model = model if autocast else model.to(dtype)  # rounded twice
        with torch.autocast("cpu", dtype, enabled=autocast and dtype in HALVES):
            logits, cache = read(model, part, sizes, cache)
        assert logits.dtype == dtype and memory_dtypes(cache) == {torch.float32}
    assert distance(logits, expected[:, 31:]) < max(HALVES.get(dtype, 0) for dtype in (first, then))


@covering(1, {"variant": TWO_VARIANTS, "dtype": HALVES})
def test_tokens_that_say_nothing(variant, dtype):
    """Tokens whose key, query or value underflows to 0 give finite logits."""
    model, ids = make_model(variant, dtype=torch.float32).to(dtype), make_ids(2, LENGTH)
    with torch.no_grad():
        for layer in model.model.layers:
            for proj in (layer.mixer.memory.q_proj, layer.mixer.memory.k_proj, layer.mixer.memory.v_proj):
                proj.weight.mul_(1e-4)  # then the convolution and SiLU: below 6e-8 for some
        model.model.embed_tokens.weight[::3] = 0
    assert full_logits(model, ids).isfinite().all()
    assert read(model, ids, [1] * LENGTH)[0].isfinite().all()


@covering(1, {"variant": TWO_VARIANTS, "dtype": HALVES})
def test_a_memory_that_says_too_much(variant, dtype):
    """Memory weights whose squares exceed float16's range give logits near float32's."""
    model, ids = make_model(variant, dtype=torch.float32), make_ids(2, LENGTH)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "initial_weights" in name:
                parameter.mul_(6000)
    expected = full_logits(model, ids)
    _, cache = read(model.to(dtype), ids)
    largest = [w.abs().amax() for layer in cache.layers for w in layer.state.memory.weights]
    assert max(largest) > 1000  # squared, it is beyond 65504
    assert distance(full_logits(model, ids), expected) < 2 * HALVES[dtype]


@covering(1, {"variant": ATTENTIONS, "dtype": HALVES})
def test_autocast_training(variant, dtype):
    """Under autocast loss and gradients are near float32's. Gradients and memory are float32 over all calls."""
    model, ids = make_model(variant, dtype=torch.float32).train(), make_ids(2, LENGTH)
    found = []
    for enabled in (False, True):
        model.zero_grad()
        cache, loss = TitansCache(model.config), 0
        with torch.autocast("cpu", dtype, enabled=enabled):
            for piece in ids.split([30, 1, 36], 1):
                loss = loss + model(piece, labels=piece, cache=cache).loss.nan_to_num(0)  # no label in 1
        loss.backward()
        assert memory_dtypes(cache) == {torch.float32}
        found.append((loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (exact_loss, exact), (loss, gradients) = found
    assert abs(loss - exact_loss) < 0.02 * exact_loss
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in gradients.values())
    everything = [torch.cat([x.flatten() for x in g.values()]) for g in (gradients, exact)]
    assert torch.cosine_similarity(*everything, dim=0) > (0.98 if dtype == torch.bfloat16 else 0.9995)

"""The cost of a call: no tensor grows with the square of the sequence, and a step never waits for the device."""

import pytest
import torch
from common import ATTENTIONS, VARIANTS, assert_same, full_logits, make_ids, make_model, read
from covering import covering
from launches import Launches, tensors_in

from titans_hf import TitansCache


class Watch(Launches):
    """Counts operations, and notes the largest tensor that any of them returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.largest = max([self.largest, *(x.numel() for x in tensors_in(result))])
        return result


def watch(fn, *args) -> Watch:
    with Watch() as watched:
        fn(*args)
    return watched


@pytest.mark.parametrize(
    "variant,attention",
    [(variant, "sdpa") for variant in VARIANTS]
    + [pytest.param(variant, "eager", marks=pytest.mark.slow) for variant in ("mac", "mag", "mal")],
)
def test_no_tensor_grows_with_the_square_of_the_sequence(variant, attention):
    """The largest tensor of a forward or backward pass grows linearly with the sequence."""
    sizes = dict(num_hidden_layers=1, memory_chunk_size=128, segment_length=128)  # few operations to watch
    model = make_model(variant, dtype=torch.float32, attention=attention, **sizes)
    train = lambda ids: model(ids, labels=ids, use_cache=False).loss.backward()  # noqa: E731
    read_on = lambda ids: read(model, ids, [5, ids.shape[1] - 5])  # noqa: E731
    for call, length in ((train, 1024), (read_on, 2048)):
        first, twice = (watch(call, make_ids(1, n)).largest for n in (length, 2 * length))
        assert twice < 0.8 * (2 * length) ** 2 and twice < 2.2 * first


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_no_tensor_grows_with_what_was_read(variant):
    """A decoding step runs the same operations on tensors of the same size after 200 and 900 tokens."""
    model, steps = make_model(variant, dtype=torch.float32), []
    for length in (200, 900):
        cache = read(model, make_ids(1, length))[1]
        steps.append(watch(read, model, make_ids(1, 1), None, cache))
    assert steps[0].largest == steps[1].largest
    assert steps[0].operations == steps[1].operations


@covering(1, {"variant": ATTENTIONS, "attention": ["sdpa", "eager"]})
def test_a_decoding_step_does_not_wait(variant, attention):
    """No operation of a decoding step needs its result on the host, which would be a round trip for every token."""
    model, ids = make_model(variant, attention=attention), make_ids(2, 13)
    mask = torch.ones(2, 13)
    mask[1, :5] = 0
    cache = TitansCache(model.config)
    later = make_ids(2, 17, seed=1)
    embeds = model.model.embed_tokens(later).detach()
    parts = []
    step = lambda token: parts.append(model(inputs_embeds=token, cache=cache).logits)  # noqa: E731
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
        for token in embeds.split(1, 1):
            watched = watch(step, token)
            assert not watched.reads and {"mm", "addmm", "bmm"} & watched.operations.keys()
    assert_same(torch.cat(parts, 1)[0], full_logits(model, torch.cat([ids, later], 1))[0, 13:])

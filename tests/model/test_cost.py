"""The cost of a call: no tensor grows with the square of the sequence, and a step never waits for the device."""

import pytest
import torch
from common import ATTENTIONS, VARIANTS, assert_same, full_logits, make_ids, make_model, read
from covering import covering
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titans_hf import TitansCache


class Watch(TorchDispatchMode):
    """The operations that run, and the largest tensor that any of them returns."""

    def __init__(self):
        super().__init__()
        self.operations, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations.add(func.overloadpacket.__name__)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return result


def watch(fn) -> Watch:
    with Watch() as watched:
        fn()
    return watched


WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"}


@pytest.mark.parametrize(
    "variant,attention",
    [(variant, "sdpa") for variant in VARIANTS]
    + [pytest.param(variant, "eager", marks=pytest.mark.slow) for variant in ("mac", "mag", "mal")],
)
def test_no_tensor_grows_with_the_square_of_the_sequence(variant, attention):
    """The largest tensor of a forward or backward pass grows linearly with the sequence."""
    sizes = dict(num_hidden_layers=1, memory_chunk_size=128, segment_length=128)  # few operations to watch
    model = make_model(variant, dtype=torch.float32, attention=attention, **sizes)
    largest = {}

    def train(ids):
        model(ids, labels=ids, use_cache=False).loss.backward()

    def read_on(ids):
        read(model, ids, [5, ids.shape[1] - 5])

    for fn, length in ((train, 1024), (read_on, 2048)):
        for tokens in (length, 2 * length):
            ids = make_ids(1, tokens)
            largest[tokens] = watch(lambda fn=fn, ids=ids: fn(ids)).largest
        assert largest[2 * length] < 0.8 * (2 * length) ** 2
        assert largest[2 * length] < 2.2 * largest[length]


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_no_tensor_grows_with_what_was_read(variant):
    """A decoding step runs the same operations on tensors of the same size after 200 and 900 tokens."""
    model, steps = make_model(variant, dtype=torch.float32), []
    for length in (200, 900):
        cache = read(model, make_ids(1, length))[1]
        steps.append(watch(lambda cache=cache: read(model, make_ids(1, 1), None, cache)))
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
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)

        def step(token):
            parts.append(model(inputs_embeds=token, cache=cache).logits)

        for token in embeds.split(1, 1):
            watched = watch(lambda token=token: step(token))
            assert not watched.operations & WAITS
            assert "mm" in watched.operations or "addmm" in watched.operations or "bmm" in watched.operations
    assert_same(torch.cat(parts, 1)[0], full_logits(model, torch.cat([ids, later], 1))[0, 13:])

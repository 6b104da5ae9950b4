"""The two rules of the memory against the token loops by autograd, in float64."""

import itertools

import pytest
import torch
from covering import covering
from rule_runs import B, D, H, assert_same, draw, draw_tokens, with_gradients

from titans_hf.memory_deep import deep_rule, huber, l2, make_network
from titans_hf.memory_reference import deep_rule_reference, delta_rule_reference
from titans_hf.memory_rule import PIECE, delta_rule

K = 6  # features
CHUNK = 4


def weights_of(shapes, *batch):
    return [0.7 * draw(*batch, H, *shape) for shape in shapes]


def in_slots(tokens, filled):
    """Puts tokens (B, H, T, ...) into the slots where `filled` (B, S) is True, and noise into the others."""
    slots = []
    for x in tokens:
        y = None if x is None else torch.randn_like(x[:, :, :1].expand(*x.shape[:2], filled.shape[1], *x.shape[3:]))
        if x is not None:
            for row in range(len(x)):
                y[row, :, filled[row]] = x[row]
        slots.append(y)
    return slots


@covering(
    2, {"length": [1, 3, 16, 45], "momentum": [True, False], "chunk_size": [1, 4, 64], "recompute": [True, False]}
)
def test_the_delta_rule(length, momentum, chunk_size, recompute):
    """Outputs, deltas, state and every gradient are the token loop's to 1e-14 of a tensor's largest entry."""
    torch.manual_seed(length)
    state = [draw(H, K, D), draw(B, H, K, D), draw(B, H, K, D) if momentum else None]
    arguments = [*draw_tokens(length, K, momentum=momentum), *state]
    ours = with_gradients(delta_rule, arguments, chunk_size=chunk_size, recompute=recompute)
    assert_same(ours, with_gradients(delta_rule_reference, arguments))


@pytest.mark.parametrize("momentum", [True, False])
def test_several_pieces(momentum):
    """The same over the bound of two pieces."""
    torch.manual_seed(0)
    state = [draw(H, K, D), draw(B, H, K, D), draw(B, H, K, D) if momentum else None]
    arguments = [*draw_tokens(PIECE["cpu"] + 21, K, momentum=momentum), *state]
    assert_same(with_gradients(delta_rule, arguments), with_gradients(delta_rule_reference, arguments), 1e-13)


@pytest.mark.parametrize("momentum", [True, False])
def test_empty_slots(momentum):
    """Slots without a token, anywhere, change neither state nor outputs, whatever stands there."""
    torch.manual_seed(0)
    tokens, state = draw_tokens(9, K, momentum=momentum), [draw(H, K, D), draw(B, H, K, D), draw(B, H, K, D)]
    state[2] = state[2] if momentum else None
    expected = delta_rule(*tokens, *state, chunk_size=CHUNK)
    filled = torch.stack([torch.randperm(14) < 9 for _ in range(B)])
    o, delta, *after = delta_rule(*in_slots(tokens, filled), *state, filled, chunk_size=CHUNK)
    o, delta = (torch.stack([x[row, :, filled[row]] for row in range(B)]) for x in (o, delta))
    assert_same([x for x in (o, delta, *after) if x is not None], [x for x in expected if x is not None])


def test_every_split_of_a_text():
    """However tokens are cut into calls, outputs and final state are those of one call."""
    torch.manual_seed(0)
    tokens, m_0, state = draw_tokens(11, K), draw(H, K, D), (draw(B, H, K, D), draw(B, H, K, D))
    whole, _, *after = delta_rule(*tokens, m_0, *state, chunk_size=CHUNK)
    for cuts in itertools.combinations(range(1, 11), 2):
        outputs, (m, s) = [], state
        for begin, end in itertools.pairwise([0, *cuts, 11]):
            o, _, m, s = delta_rule(*(x[:, :, begin:end] for x in tokens), m_0, m, s, chunk_size=CHUNK)
            outputs.append(o)
        assert_same([torch.cat(outputs, 2), m, s], [whole, *after])


def gated(x, layers):
    """A network of one's own: two layers multiplied, and a residual."""
    return x + layers[2](torch.tanh(layers[0](x)) * layers[1](x))


def cosine(prediction, value):
    """A loss of one's own."""
    return 1 - torch.cosine_similarity(prediction, value, dim=-1)


# Network, inner loss, clips, shapes of the layers, and a factor of the steps: the plain losses diverge at larger ones.
WIDE = [(D, 8), (8, D)]
DEEP_FORMS = {
    "one layer": (make_network("mlp", "silu"), huber, True, [(D, D)], 1.0),
    "huber": (make_network("mlp", "silu"), huber, True, WIDE, 0.2),
    "three layers": (make_network("mlp", "gelu"), huber, True, [(D, 8), (8, 8), (8, D)], 0.2),
    "plain loss": (make_network("mlp", "relu"), l2, False, WIDE, 0.01),
    "residual": (make_network("residual", "gelu"), l2, False, WIDE, 0.1),
    "own network": (gated, l2, False, [(D, 8), (D, 8), (8, D)], 0.01),
    "own loss": (make_network("mlp", "identity"), cosine, False, WIDE, 0.2),
}


@covering(
    2,
    {
        "form": DEEP_FORMS,
        "momentum": [True, False],
        "gates_per_layer": [True, False],
        "forgets_to": ["M_0", "0"],
        "num_seen": [[0, 0, 0], [2, 2, 2], [5, 0, 3]],
        "length": [1, 3, 13],
        "recompute": [True, False],
    },
)
def test_the_deep_rule(form, momentum, gates_per_layer, forgets_to, num_seen, length, recompute):
    """Outputs, norms, state and every gradient are the token loop's to 1e-13 of a tensor's largest entry (1e-11 through
    the norm of a residual network, where rounding grows), at every place of a chunk, for networks and losses by name
    and of one's own.
    """
    torch.manual_seed(length)
    network, loss, clips, shapes, factor = DEEP_FORMS[form]
    tokens = draw_tokens(length, layers=len(shapes) if gates_per_layer else None, momentum=momentum)
    tokens[3] = factor * tokens[3]
    m_0 = weights_of(shapes) if forgets_to == "M_0" else None
    state = [weights_of(shapes, B), weights_of(shapes, B) if momentum else [], weights_of(shapes, B)]
    seen = torch.tensor(num_seen)
    options = dict(network=network, loss=loss, clips=clips, chunk_size=CHUNK)
    # Each row's tokens stand in slots that begin at its place in the chunk, as in the model.
    slots = torch.arange(length + int((seen % CHUNK).max()))
    first = (seen % CHUNK)[:, None]
    filled = (slots >= first) & (slots < first + length)
    chunk_starts = torch.stack([((first <= c) & (first + length > c))[:, 0] for c in range(0, len(slots), CHUNK)])

    def ours(*arguments):
        *tokens, m_0, weights, momentum, anchor = arguments
        rule = dict(options, recompute=recompute)
        o, norm, *after = deep_rule(
            *in_slots(tokens, filled), m_0, weights, momentum, anchor, filled, chunk_starts, **rule
        )
        return [torch.stack([x[row, :, filled[row]] for row in range(B)]) for x in (o, norm)] + after

    def theirs(*arguments):
        return deep_rule_reference(*arguments, seen, **options)

    arguments = [*tokens, m_0, *state]
    results = [with_gradients(fn, arguments) for fn in (ours, theirs)]
    assert_same(*results, 1e-11 if form == "residual" else 1e-13)


def test_in_inference_mode():
    """Without gradients, in inference mode too, outputs and state are the same."""
    network, loss, clips, shapes, _ = DEEP_FORMS["huber"]
    options = dict(network=network, loss=loss, clips=clips, chunk_size=CHUNK)
    found = []
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        with context():
            state = weights_of(shapes, B), weights_of(shapes, B), weights_of(shapes, B)
            o, _, weights, *_ = deep_rule(*draw_tokens(9), None, *state, **options)
        found.append([o, *weights])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.parametrize("network,message", [
    (lambda x, layers: layers[0](layers[0](x)), "once, but calls layer 0 again"),
    (lambda x, layers: layers[1](x), "each of its 2 layers once, but calls 1"),
])  # fmt: skip
def test_a_network_calls_each_layer_once(network, message):
    """A network that leaves out a layer or calls it twice would get a wrong gradient: ValueError."""
    shapes = [(D, D), (D, D)]
    state = weights_of(shapes, B), weights_of(shapes, B), weights_of(shapes, B)
    with pytest.raises(ValueError, match=message):
        deep_rule(*draw_tokens(3), None, *state, network=network, loss=l2)

"""Groups of chunks as graphs; on a CPU a tape takes the place of a CUDA graph."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import VARIANTS, full_logits, gradients, left_pad, make_ids, make_model
from covering import covering, in_one_test
from tape import Tape
from test_launches import Launches, decode, make, read, train

from titans_hf import memory_chunk, memory_graphs, memory_ops
from titans_hf.memory_state import tensors_of

FORMS = {
    "titans": dict(),
    "delta": dict(memory_form="delta"),
    "chunk rule": dict(memory_update_rule="chunk"),
    "paper": dict(memory_form="paper"),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Graphs on a CPU, from the second call of a shape on."""
    monkeypatch.setitem(memory_graphs.RECORDINGS, "cpu", Tape)
    monkeypatch.setattr(memory_graphs, "RECORDED_CALL", 2)
    monkeypatch.setattr(memory_chunk, "SOLVED_BY_HALVES", {"cpu"})
    yield
    for function in memory_ops.GRAPHS:
        function.shapes.clear()


def replays(run) -> int:
    """Counts the replays of a function."""
    before = Tape.number_of_replays
    run()
    return Tape.number_of_replays - before


def step(model, length: int, seed: int, padded: bool) -> list[torch.Tensor]:
    """Returns logits, loss, gradients of two rows that end, and padded start, in a chunk; and two tokens' logits."""
    ids, mask = left_pad([make_ids(length, seed=seed), make_ids(length - 6 * padded, seed=seed + 1)])
    model.zero_grad()
    output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)
    output.loss.backward()
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).cache
        tokens = [model(token, cache=cache).logits for token in ids[:, :2].split(1, dim=1)]
    return [full_logits(model, ids, mask), output.loss, *tokens, *tensors_of([*gradients(model).values()])]


@covering(2, {"variant": VARIANTS, "form": FORMS, "padded": [False, True]})
def test_replays_are_equal_to_the_bit(variant, form, padded, monkeypatch):
    """Logits, loss and every gradient are those of the functions themselves, for texts of two lengths."""
    model = make_model(variant, dtype=torch.float32, **FORMS[form])
    found = []
    for recorded_call in (1 << 30, 2):  # never, and at the second
        monkeypatch.setattr(memory_graphs, "RECORDED_CALL", recorded_call)
        found.append([])
        number = replays(lambda: found[-1].extend(step(model, 29 + 16 * i, i, padded) for i in range(3)))
        assert bool(number) == (recorded_call == 2)
    for ours, theirs in zip(*found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("group_size,most", [(4, (2709, 7574)), (32, (1953, 6146))])
def test_launches_with_graphs(group_size, most, monkeypatch):
    """The launches of a MAG of 12 layers for reading and for training on 2,048 tokens, copies and replays included."""
    monkeypatch.setitem(memory_ops.GROUP_SIZES, "cpu", group_size)
    for run, allowed in zip((read, train), most, strict=True):
        totals = []
        for model in map(make, (1, 2)):
            run(model, 2048), run(model, 2048)
            before = Tape.number_of_replays
            launches = run(model, 2048)
            totals.append(launches.total + Tape.number_of_replays - before)
            assert launches.reads == 0
        assert totals[0] + 11 * (totals[1] - totals[0]) <= allowed


@covering(2, {"variant": VARIANTS, "form": FORMS})
def test_a_whole_step_is_one_graph(variant, form, monkeypatch):
    """A training step without a mask is recorded with no read by the host, and replayed with other ids it has the loss
    and every gradient, to the bit.
    """
    monkeypatch.delitem(memory_graphs.RECORDINGS, "cpu")  # groups are not replayed while a caller records
    model, ids = make_model(variant, dtype=torch.float32, **FORMS[form]), make_ids(2, 37)

    def step() -> list[torch.Tensor]:
        loss = model(ids, labels=ids, use_cache=False).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    step()
    tape = Tape(step)
    ids.copy_(make_ids(2, 37, seed=1))
    tape.replay()
    assert all(map(torch.equal, tape.results, step()))


@pytest.mark.parametrize("recorded_call,most", [(1 << 30, 1363), (2, 847)])
def test_launches_of_a_token(recorded_call, most, monkeypatch):
    """The launches of one more token in twelve layers, and where a replay takes the place of each memory's step."""
    monkeypatch.setattr(memory_graphs, "RECORDED_CALL", recorded_call)
    one, two = (decode(make(number)).total + number * (recorded_call == 2) for number in (1, 2))
    assert one + 11 * (two - one) <= most


@torch.no_grad()
@covering(2, {"variant": VARIANTS, "form": FORMS})
def test_a_decoded_token_is_one_graph(variant, form):
    """A token's step with states as arguments and results replays to the bit, in ten launches and with no read."""
    model, ids = make_model(variant, dtype=torch.float32, memory_kernel="torch", **FORMS[form]), make_ids(2, 40)
    cache = model(ids, use_cache=True).cache

    def step(token: torch.Tensor, states: tuple) -> tuple:
        for layer, state in zip(cache.layers, states, strict=True):
            layer.state = state
        return model(token, cache=cache).logits, tuple(layer.state for layer in cache.layers)

    recorded, (_, states) = memory_graphs.Recorded(step, 2), step(ids[:, :1], [x.state for x in cache.layers])
    for token in ids[:, :10].split(1, dim=1):
        with Launches() as launches:
            results = recorded(token, states)
        assert all(map(torch.equal, tensors_of(results), tensors_of(step(token, states))))
        states = results[1]
    assert launches.total < 10


@in_one_test("of_host", [torch.Tensor.item, torch.nonzero, lambda x: x[x > 0], lambda x: torch.tensor([1.0]) + x])
def test_what_the_host_reads_or_sends_is_an_error(of_host):
    """A tape refuses what would end the recording of a CUDA graph."""
    with pytest.raises(RuntimeError, match="host"):
        Tape(lambda: of_host(torch.ones(1)))


@pytest.mark.parametrize("place", ["another stream", "a compiled model", "compile_memory", "a subclass", "torch"])
def test_where_nothing_is_replayed(place, monkeypatch):
    """Functions are called where a replay would be wrong, where a compiler takes them, and on request."""
    model, ids = make_model("lmm", dtype=torch.float32), make_ids(1, 32)
    changes = {
        "another stream": (Tape, "is_possible", lambda device: False),
        "a compiled model": (torch.compiler, "is_compiling", lambda: True),
        "compile_memory": (memory_ops, "_compiled", memory_ops.GROUP_FUNCTIONS),
        "a subclass": (memory_graphs, "Tensor", torch.nn.Parameter),
        "torch": (model.config, "memory_kernel", "torch"),
    }
    read_thrice = lambda: [full_logits(model, ids) for _ in range(3)]  # noqa: E731
    assert replays(read_thrice)
    monkeypatch.setattr(*changes[place])
    assert not replays(read_thrice)


def test_threads_and_modes():
    """Graphs that `inference_mode` recorded serve threads with texts of their own, and training."""
    model, texts = make_model("lmm", dtype=torch.float32), [make_ids(1, 32, seed=i) for i in range(8)]
    with torch.inference_mode():
        expected = [full_logits(model, ids).clone() for ids in texts]
    with ThreadPoolExecutor(8) as threads:
        assert all(map(torch.equal, threads.map(lambda ids: full_logits(model, ids), texts), expected))
    assert replays(lambda: step(model, 32, 0, padded=False))


def test_few_shapes_are_kept():
    """Of prompts of many lengths a function keeps the shapes that were used last."""
    model = make_model("lmm", dtype=torch.float32, memory_chunk_size=32)
    for length in range(1, 31):
        full_logits(model, make_ids(1, length + 64))
    assert all(len(function.shapes) <= memory_graphs.MOST_SHAPES for function in memory_ops.GRAPHS)
    full_logits(model, make_ids(1, 64))
    assert replays(lambda: full_logits(model, make_ids(1, 64)))

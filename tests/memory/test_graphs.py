"""Groups of chunks as graphs; on a CPU a tape takes the place of a CUDA graph."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import VARIANTS, full_logits, gradients, left_pad, make_ids, make_model
from covering import covering
from tape import Tape
from test_launches import make, read, train

from titans_hf import memory_chunk, memory_graphs, memory_ops

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
    """Returns logits, loss and gradients of two rows that end, and with padding start, within a chunk."""
    ids, mask = left_pad([make_ids(length, seed=seed), make_ids(length - 6 * padded, seed=seed + 1)])
    model.zero_grad()
    output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)
    output.loss.backward()
    return [full_logits(model, ids, mask), output.loss, *(x for x in gradients(model).values() if x is not None)]


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


@pytest.mark.parametrize("group_size,most", [(4, (3387, 8336)), (32, (2631, 6908))])
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


@pytest.mark.parametrize("read_by_host", [torch.Tensor.item, bool, torch.nonzero, lambda x: x[x > 0]])
def test_a_value_that_the_host_waits_for_is_an_error(read_by_host):
    """A tape refuses what would end the recording of a CUDA graph."""
    with pytest.raises(RuntimeError, match="host"):
        Tape(lambda: read_by_host(torch.ones(1)))


ELSEWHERE = {
    "another stream": (Tape, "is_possible", lambda device: False),
    "a compiled model": (torch.compiler, "is_compiling", lambda: True),
    "compile_memory": (memory_ops, "_compiled", memory_ops.GROUP_FUNCTIONS),
    "a subclass of tensors": (memory_graphs, "Tensor", torch.nn.Parameter),
}


@pytest.mark.parametrize("place", [*ELSEWHERE, "memory_kernel"])
def test_where_nothing_is_replayed(place, monkeypatch):
    """Functions are called where a replay would be wrong, where a compiler takes them, and on request."""
    model, ids = make_model("lmm", dtype=torch.float32), make_ids(1, 32)
    read_thrice = lambda: [full_logits(model, ids) for _ in range(3)]  # noqa: E731
    assert replays(read_thrice)
    if place in ELSEWHERE:
        monkeypatch.setattr(*ELSEWHERE[place])
    else:
        model.config.memory_kernel = "torch"
    assert not replays(read_thrice)


def test_graphs_outlive_the_mode_that_recorded_them():
    """A graph that was recorded under `inference_mode` trains."""
    model = make_model("lmm", dtype=torch.float32)
    with torch.inference_mode():
        for _ in range(2):
            model(make_ids(1, 32), use_cache=False)
    assert replays(lambda: step(model, 32, 0, padded=False))


def test_eight_threads():
    """Threads that replay the same graphs get the results of their own texts."""
    model = make_model("lmm", dtype=torch.float32)
    texts = [make_ids(1, 32, seed=i) for i in range(8)]
    expected = [full_logits(model, ids) for ids in texts]
    with ThreadPoolExecutor(8) as threads:
        assert all(map(torch.equal, threads.map(lambda ids: full_logits(model, ids), texts), expected))


def test_few_shapes_are_kept():
    """Of prompts of many lengths a function keeps the shapes that were used last."""
    model = make_model("lmm", dtype=torch.float32, memory_chunk_size=32)
    for length in range(1, 31):
        full_logits(model, make_ids(1, length + 64))
    assert all(len(function.shapes) <= memory_graphs.MOST_SHAPES for function in memory_ops.GRAPHS)
    full_logits(model, make_ids(1, 64))
    assert replays(lambda: full_logits(model, make_ids(1, 64)))

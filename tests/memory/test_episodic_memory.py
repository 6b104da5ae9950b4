"""The episodic token memory: every call equals the token loop of its equations, and no row or document sees another."""

import pytest
import torch
from common import (
    FORMS,
    TWO_VARIANTS,
    VARIANTS,
    assert_same,
    assert_same_cache,
    full_logits,
    gradients,
    load_aligned,
    make_config,
    make_ids,
    make_model,
    read,
    shared_model,
)
from covering import covering, in_one_test
from huggingface_hub.errors import StrictDataclassError
from naive_model import episodic_memory, naive_forward
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy

from titans_hf import (
    TitansCache,
    TitansConfig,
    TitansForCausalLM,
    TitansForSequenceClassification,
    TitansModel,
    TitansTimeSeriesConfig,
)
from titans_hf.episodic_memory import BLOCK, EpisodicMemory
from titans_hf.memory_state import tensors_of
from titans_hf.token_grid import ALL_TOKENS, TokenGrid
from titans_hf.token_layout import TokenLayout

CHANGES = FORMS["episodic memory"]


def without_memory(model) -> TitansForCausalLM:
    """Returns the same model without the episodic memory."""
    config = make_config(model.config.variant, **{**CHANGES, "token_memory_entries": 0})
    plain = TitansForCausalLM(config).to(model.dtype).eval()
    result = plain.load_state_dict(model.state_dict(), strict=False)
    assert not result.missing_keys and all(name.startswith("model.episodic") for name in result.unexpected_keys)
    return plain


def ring_of(cache: TitansCache):
    return cache.layers[-1].state.entries.entries


@covering(1, {"variant": VARIANTS, "length": [1, 2, 41, 2 * BLOCK + 9]})
def test_logits_and_entries_equal_those_of_the_token_loop(variant, length):
    """The logits, and the ring that a call leaves, are those of a loop over the tokens, also across several blocks."""
    model, ids = shared_model(variant, **CHANGES), make_ids(length)
    assert_same(full_logits(model, ids[None])[0], naive_forward(model, ids)[0], 1e-9)
    with torch.no_grad():
        outputs = model.model(ids[None], defer_episodic_memory=True)
        logits = model.lm_head(outputs.last_hidden_state[0])
        _, entries = episodic_memory(model.model.episodic_memory, model.config, outputs.mlp_inputs[0], logits, ids)
    ring = ring_of(read(model, ids[None])[1])
    number = len(entries)
    assert number == len(ring.tokens[0]) if length > 40 else number < length
    assert ring.tokens[0, : len(ring.tokens[0]) - number].eq(-1).all()
    names = ("keys", "contexts", "tokens", "losses", "positions")
    for at, entry in enumerate(entries, len(ring.tokens[0]) - number):
        for name, expected in zip(names, entry, strict=True):
            assert_same(getattr(ring, name)[0, at].to(torch.float64), torch.as_tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_gradients_equal_those_of_the_token_loop(variant):
    """The gradient of every parameter, of the memory's and of the model's, is autograd's through the token loop."""
    model, ids = make_model(variant, num_hidden_layers=1, **CHANGES), make_ids(BLOCK + 5)
    weights = torch.randn(len(ids), 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (model(ids[None]).logits[0] * weights).sum().backward()
    found = gradients(model)
    model.zero_grad()
    (naive_forward.__wrapped__(model, ids)[0] * weights).sum().backward()
    for name, expected in gradients(model).items():
        assert_same(found[name], expected, 1e-8 * max(1.0, expected.abs().max().item()))
    assert all(found[f"model.episodic_memory.{name}"].abs().max() > 1e-4 for name in EpisodicMemory.PARAMETERS)


@covering(1, {"variant": VARIANTS, "sizes": [[1] * 41, [5, 1, 20, 15], [40, 1], [3, 38]]})
def test_pieces(variant, sizes):
    """Any cut of a text gives the logits and the state of the whole text, in every row of a batch."""
    model, ids = shared_model(variant, **CHANGES), make_ids(3, 41)
    logits, cache = read(model, ids, sizes)
    assert_same(logits, full_logits(model, ids))
    assert_same_cache(cache, read(model, ids)[1])
    for row, ours in zip(ids, logits, strict=True):
        assert_same(ours, full_logits(model, row[None])[0])


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_no_logit_depends_on_a_later_token(variant):
    """Other tokens later in a text change no logit before them, even if they fill the whole ring."""
    model, ids = shared_model(variant, **CHANGES), make_ids(1, 60)
    other = torch.cat([ids[:, :30], make_ids(1, 30, seed=5)], dim=1)
    assert_same(full_logits(model, other)[:, :30], full_logits(model, ids)[:, :30], 0)


def test_an_empty_ring_leaves_the_logits_as_they_are():
    """Before the first entry, the logits are bit for bit those of the model without the memory."""
    model, ids = shared_model("mag", **CHANGES), make_ids(1, 1)
    for _ in range(5):  # tokens that are no surprise
        ids = torch.cat([ids, full_logits(model, ids)[:, -1:].argmax(-1)], dim=1)
    assert ring_of(read(model, ids)[1]).tokens.max() < 0
    ids = torch.cat([ids, make_ids(1, 30)], dim=1)
    plain, mixed = full_logits(without_memory(model), ids), full_logits(model, ids)
    assert torch.equal(mixed[:, :6], plain[:, :6]) and not torch.equal(mixed, plain)


def test_memory_off_writes_nothing():
    """With memory_max_lr = 0 no entry is written, which a larger rate writes."""
    model, ids = make_model("mag", **CHANGES, memory_max_lr=0), make_ids(1, 30)
    assert ring_of(read(model, ids)[1]).tokens.max() < 0
    model.config.memory_max_lr = 0.5
    assert ring_of(read(model, ids)[1]).tokens.max() >= 0


def test_documents_and_padding():
    """Packed documents have the logits that each has alone, with padding anywhere and after a cache, and the ring that
    is left is that of the last document.
    """
    model, lengths = shared_model("mag", **CHANGES), (13, 21, 1, 30)
    rows = [make_ids(length, seed=length) for length in lengths]
    first = make_ids(17, seed=3)
    ids, index = torch.cat(rows), torch.arange(4).repeat_interleave(torch.tensor(lengths))
    at = torch.arange(len(ids)) + torch.arange(len(ids)) // 3  # a column of padding after every three
    width = int(at.max()) + 3
    padded, mask, seq_idx = (torch.zeros(1, width, dtype=torch.long) for _ in range(3))
    padded[0, at], mask[0, at], seq_idx[0, at] = ids, 1, index
    cache = read(model, first[None])[1]
    with torch.no_grad():
        logits = model(padded, mask, cache=cache, seq_idx=seq_idx).logits[0, at].split(lengths)
    alone = torch.cat([first, rows[0]])
    assert_same(logits[0], full_logits(model, alone[None])[0, 17:])
    for row, ours in zip(rows[1:], logits[1:], strict=True):
        assert_same(ours, full_logits(model, row[None])[0])
    assert_same_cache(cache, read(model, rows[-1][None])[1])


def test_logits_to_keep():
    """Whichever logits are kept, they are those of the whole call, and the memory reads every token."""
    model, ids = shared_model("mag", **CHANGES), make_ids(2, 150)
    full, whole = read(model, ids)
    mask = torch.rand(2, 150, generator=torch.Generator().manual_seed(0)) < 0.1
    places = torch.tensor([3, 149, 70])
    kept = {"1": (1, full[:, -1:]), "40": (40, full[:, -40:]), "200": (200, full), "places": (places, full[:, places])}
    kept["mask"] = (mask, full[mask])
    for name, (logits_to_keep, expected) in kept.items():
        with torch.no_grad():
            output = model(ids, use_cache=True, logits_to_keep=logits_to_keep)
        assert_same(output.logits, expected), name
        assert_same_cache(output.cache, whole)


def test_generate():
    """Greedy generation gives the tokens of plain forward passes, with drafts that are removed again too."""
    model = shared_model("mag", **CHANGES)
    ids = make_ids(1, 9).repeat(1, 4)
    expected = ids
    for _ in range(12):
        expected = torch.cat([expected, full_logits(model, expected)[:, -1:].argmax(-1)], dim=1)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), expected)
    assert torch.equal(model.generate(ids, prefill_chunk_size=5, **options), expected)


def test_what_the_base_model_reads_leaves_no_entries():
    """`TitansModel` and the heads have no LM head: the ring stays as it was."""
    model, ids = shared_model("mag", **CHANGES), make_ids(2, 40)
    cache = read(model, ids[:, :20])[1]
    before = ring_of(cache)
    with torch.no_grad():
        model.model(ids[:, 20:30], cache=cache)
    assert torch.equal(ring_of(cache).tokens, before.tokens) and torch.equal(ring_of(cache).keys, before.keys)
    assert cache.num_tokens_seen.tolist() == cache.layers[-1].state.memory.num_seen.tolist() == [30, 30]
    read(model, ids[:, 30:], None, cache)
    assert not torch.equal(ring_of(cache).tokens, before.tokens)
    states = TitansModel(model.config).double().eval()
    states.load_state_dict(model.model.state_dict())
    with torch.no_grad():
        assert_same(states(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_heads_do_not_train_it():
    """Every parameter of a head's model that is trained has a gradient, as DDP needs it."""
    head = TitansForSequenceClassification(make_config("mag", **CHANGES, num_labels=2, pad_token_id=0))
    head(make_ids(2, 30), labels=torch.tensor([0, 1])).loss.backward()
    without = [name for name, x in head.named_parameters() if x.requires_grad and x.grad is None]
    assert not without
    assert not any(x.requires_grad for x in head.model.episodic_memory.parameters())


def test_embeddings_are_read_but_not_stored():
    """A token that is given as an embedding has no number to store; tokens after it are stored as ever."""
    model, ids = shared_model("mag", **CHANGES), make_ids(1, 40)
    cache = TitansCache(model.config)
    with torch.no_grad():
        model(inputs_embeds=model.model.embed_tokens(ids[:, :25]), cache=cache)
        assert ring_of(cache).tokens.max() < 0
        model(ids[:, 25:], cache=cache)
    expected = ring_of(read(model, ids)[1])
    number = int((ring_of(cache).tokens >= 0).sum())
    assert 2 < number <= 7
    assert torch.equal(ring_of(cache).tokens[0, -number:], expected.tokens[0, -number:])


def test_merging_keeps_the_newest_of_both_in_turn():
    """A merged ring has the newest entries of both texts, as many of each as the weight says, oldest first."""
    model, ids = shared_model("mag", **CHANGES), make_ids(2, 60)
    first, second = (read(model, row[None])[1] for row in ids)
    ours, theirs = (ring_of(cache).tokens[0].tolist() for cache in (first, second))
    last, at = first.layers[-1].state.entries.last_tokens, ring_of(first).positions[0, 3]
    first.merge(second)
    assert ring_of(first).tokens[0].tolist() == [ours[3], theirs[4], ours[4], theirs[5], ours[5], theirs[6], ours[6]]
    assert_same(ring_of(first).keys[0, 1], ring_of(second).keys[0, 4])
    assert torch.equal(first.layers[-1].state.entries.last_tokens, last)
    assert ring_of(first).positions[0, 0] == at and ring_of(first).positions[0, 1] < -(10**9)  # out of any window
    fewer = read(model, ids[:1])[1]
    fewer.merge(second, weight=0.25)
    merged = ring_of(fewer).tokens[0].tolist()
    assert merged == [theirs[5], *ours[2:5], theirs[6], *ours[5:]]
    short = read(model, ids[:1, :3])[1]
    number = int((ring_of(short).tokens >= 0).sum())
    short.merge(second)
    assert number < 3 and int((ring_of(short).tokens >= 0).sum()) == 7  # theirs fill what ours leave


def test_bfloat16():
    """Keys are stored in 8 bits and compared in float32: 5,400 entries take 0.5 MB, and pieces give the state and, to
    float32, the mixture of the whole call.
    """
    config = TitansConfig(
        hidden_size=96, vocab_size=500, num_attention_heads=2, num_hidden_layers=1, token_memory_form="episodic",
        token_memory_entries=5400, token_memory_threshold=3,
    )  # fmt: skip
    torch.manual_seed(0)
    memory = EpisodicMemory(config, 1).bfloat16()
    memory.gate_bias.data.fill_(0.0)
    memory.projection.data.normal_()
    inputs, states = torch.randn(2, 2, 300, 96).bfloat16()
    words = torch.randn(96, 500) / 5

    def head(states):
        return states.float() @ words

    logits = head(states)
    tokens = torch.randint(500, (2, 300))

    def run(sizes):
        cache, outputs, begin = TitansCache(config), [], 0
        for size in sizes:
            layout = TokenLayout(ALL_TOKENS, TokenGrid.identity(2, size, inputs.device))
            piece = slice(begin, begin + size)
            outputs.append(memory(inputs[:, piece], states[:, piece], tokens[:, piece], head, size, layout, cache))
            begin += size
        return torch.cat(outputs, dim=1), cache

    with torch.no_grad():
        whole, cache = run([300])
        pieces, other = run([1, 130, 1, 1, 167])
    entries = ring_of(cache)
    assert entries.keys.dtype == torch.int8 and whole.dtype == torch.float32
    assert sum(x[:1].numel() * x.element_size() for x in tensors_of(entries)) == 5400 * 90
    assert 200 < int((entries.tokens[0] >= 0).sum()) < 300
    assert all(torch.equal(a, b) for a, b in zip(cache.layers[-1].tensors(), other.layers[-1].tensors(), strict=True))
    assert_same(pieces, whole, 1e-5)
    assert (whole - logits).abs().max() > 0.1


def test_autocast():
    """Under autocast, the mixture stays in float32, and the LM head runs as it does without the memory, whether
    all logits are kept or the last.
    """
    model, ids = make_model("mag", dtype=torch.float32, **CHANGES), make_ids(1, 90)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        every = model(ids, use_cache=True)
        last = model(ids, use_cache=True, logits_to_keep=1)
    assert_same(last.logits, every.logits[:, -1:], 1e-2)
    assert torch.equal(ring_of(every.cache).tokens, ring_of(last.cache).tokens)
    assert_same(ring_of(every.cache).keys.float().norm(dim=-1) / 127, torch.ones(1, 7), 0.01)


def test_a_compiled_step_is_one_graph():
    """A decoding step with the memory is one graph, compiled once for any number of tokens read, and gives the logits
    of the whole call; so does a compiled call of many tokens.
    """
    model, ids = shared_model("mag", **CHANGES), make_ids(2, 20)
    cache, counter, whole = TitansCache(model.config, compileable=True), CompileCounter(), full_logits(model, ids)
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    with torch.no_grad():
        model(ids[:, :10], cache=cache)
        for at in range(10, 20):
            assert_same(step(input_ids=ids[:, at : at + 1], cache=cache).logits, whole[:, at : at + 1])
        assert counter.frame_count == 1
        assert_same(step(input_ids=ids, use_cache=False).logits, whole)
    torch._dynamo.reset()


def test_a_repeated_text_is_remembered():
    """With its gate opened, an untrained model predicts names that it has read before far better than at first."""
    torch.manual_seed(0)
    changes = dict(token_memory_entries=400, token_memory_key_size=32, hidden_size=64, vocab_size=100)
    model = TitansForCausalLM(make_config("mag", **CHANGES | changes, initializer_range=0.1)).eval()
    with torch.no_grad():
        model.model.episodic_memory.gate_bias.fill_(1.0)
    names = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:32].view(8, 4)
    order = torch.cat([torch.randperm(8, generator=torch.Generator().manual_seed(i)) for i in range(10)])
    ids = names[order].flatten()
    losses = cross_entropy(full_logits(model, ids[None, :-1])[0], ids[1:], reduction="none")
    within = torch.arange(1, len(ids)) % 4 > 0  # a name's first token comes after any name
    assert losses[127:][within[127:]].mean() < losses[:31][within[:31]].mean() - 1


def test_saved_and_loaded(tmp_path):
    """A checkpoint keeps the memory's parameters."""
    model, ids = make_model("mag", **CHANGES), make_ids(1, 30)
    model.save_pretrained(tmp_path)
    assert_same(full_logits(load_aligned(tmp_path), ids), full_logits(model, ids), 0)


@in_one_test("fields,message", [
    (dict(token_memory_entries=8), "`token_memory_entries` must be 0 with `token_memory_form='delta'`, but is 8"),
    (dict(token_memory_features=8, token_memory_form="episodic"), "`token_memory_features` must be 0 with"),
    (dict(token_memory_threshold=-1), "`token_memory_threshold` must be at least 0, but is -1"),
    (dict(token_memory_key_size=0), "`token_memory_key_size` must be at least 1, but is 0"),
])  # fmt: skip
def test_bad_values(fields, message):
    """A value that is not possible is refused by name."""
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        make_config("mag", tie_word_embeddings=True, **fields)
    with pytest.raises(StrictDataclassError, match="`token_memory_entries` must be 0, but is 8: a time series"):
        TitansTimeSeriesConfig(token_memory_form="episodic", token_memory_entries=8)

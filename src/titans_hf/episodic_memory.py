"""The episodic token memory: remembers which token followed where, if that token was a surprise, and mixes what it
remembers with the model's distribution of the next token.

With y_t the input of the last layer's feed-forward network, x_t the tokens, p_t the model's distribution after x_t:

    k_t = W (y_t - c) / |W (y_t - c)|
    the entry (k_{t-1}, x_t) is written if -log p_{t-1}(x_t) >= threshold
    a_ti = softmax_i(beta k_t k_i),  m_t(v) = sum of a_ti over the entries i whose token is v
    l_t = sigmoid(w f_t + b)
    output logits = log((1 - l_t) p_t + l_t m_t) + log Z_t

Entries are in a ring: i runs over the newest N of those written up to x_t. Only surprising tokens are written: the
model knows the others already. The center c, the projection W, the sharpness beta and the read gate (w, b) are
parameters; f_t are four features: the log of the sum of exp(beta k_t k_i); m_t of the best entry's token; the entropy
of p_t in nats; the log of the number of entries. Z_t is the sum of exp(logits) of the model, so that a model that has
written nothing has exactly its own logits. The memory belongs to the language model: a `TitansModel` alone has no p_t,
and what it reads leaves no entries. Nor does a token that is given as an embedding, because it has no number.

An extension beyond the paper.
Shapes: B batch, T columns, N entries of the ring, K key size, V vocabulary, S expected tokens, Q columns of a block.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize, pad
from transformers.utils.generic import maybe_autocast

from .cache_layer import LayerState, RecordedColumns, TokenEntries
from .cache_titans import TitansCache
from .configuration_titans import TitansConfig
from .memory_state import MemoryState
from .token_grid import Columns
from .token_layout import TokenLayout

BLOCK = 64  # columns that are read at once: they bound the memory needed
IN_CACHE, NONE = -1, -2  # instead of a column: the last token of the cache, no token
UNITS = (10, 1, 4, 5)  # by which the features are divided: they are then of the order of 1
INITIAL_SHARPNESS = 12.0
INITIAL_GATE = -5.0  # a new memory has at most a share of sigmoid(-5) = .007


class EpisodicMemory(nn.Module):
    """Writes the surprising tokens of a call, and mixes the model's logits with what follows in like contexts."""

    PARAMETERS = ("center", "projection", "log_sharpness", "gate_weight", "gate_bias")

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        size = config.token_memory_key_size
        self.num_expected = config.num_expected_tokens
        self.input_size = size + 1 + self.num_expected
        self.center = nn.Parameter(torch.zeros(config.hidden_size))
        self.projection = nn.Parameter(torch.empty(config.hidden_size, size))
        self.log_sharpness = nn.Parameter(torch.empty(1))
        self.gate_weight = nn.Parameter(torch.zeros(len(UNITS)))
        self.gate_bias = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self, init=nn.init) -> None:
        """Initialises with the functions of `init`."""
        init.zeros_(self.center)
        init.normal_(self.projection, std=self.config.hidden_size**-0.5)
        init.constant_(self.log_sharpness, math.log(INITIAL_SHARPNESS))
        init.zeros_(self.gate_weight)
        init.constant_(self.gate_bias, INITIAL_GATE)

    def initial_state(self, batch_size: int, dtype: torch.dtype) -> LayerState:
        """Returns the state before the first token: an empty ring; conv_state (B, 1, K): the key of the token before,
        zeros where there is none.
        """
        ring, size = self.config.token_memory_entries, self.config.token_memory_key_size
        zeros = partial(self.center.new_zeros, dtype=dtype)
        no_tokens = partial(self.center.new_full, fill_value=-1, dtype=torch.int32)
        memory = MemoryState((), (), (), self.center.new_zeros(batch_size, dtype=torch.int64))
        entries = TokenEntries(
            zeros((batch_size, ring, size)), no_tokens((batch_size, ring)), no_tokens((batch_size, self.num_expected))
        )
        return LayerState(memory, zeros((batch_size, 1, size)), entries=entries)

    def keys(self, mlp_inputs: Tensor) -> Tensor:
        """Computes k (B, T, K), in float32 at least, from y (B, T, hidden)."""
        dtype = torch.promote_types(mlp_inputs.dtype, torch.float32)
        centred = mlp_inputs.to(dtype) - self.center.to(dtype)
        with maybe_autocast(mlp_inputs.device.type, enabled=False):
            return normalize(centred @ self.projection.to(dtype), dim=-1)  # (B, T, D) @ (D, K)

    def forward(
        self,
        mlp_inputs: Tensor,
        tokens: Tensor | None,
        logits_of: Callable[[int, int], Tensor] | None,
        num_kept: int,
        layout: TokenLayout,
        past_key_values: TitansCache | None = None,
    ) -> Tensor | None:
        """Mixes the logits of the last `num_kept` columns, (B, num_kept, V), and updates its part of the cache.

        Args:
            mlp_inputs (B, T, hidden): y.
            tokens (B, T) int64: x; -1 for a token that is given as an embedding.
            logits_of: returns the model's logits (B, end - begin, V) of the columns from begin to end. None if there is
                no LM head: nothing is written then, and None is returned.
        """
        found = self.comparisons(mlp_inputs, tokens, logits_of, num_kept, layout, past_key_values)
        if logits_of is None:
            return None
        return torch.cat([self._mix(logits, comparison) for logits, comparison in found], dim=1)

    def comparisons(
        self,
        mlp_inputs: Tensor,
        tokens: Tensor | None,
        logits_of: Callable[[int, int], Tensor] | None,
        num_kept: int,
        layout: TokenLayout,
        past_key_values: TitansCache | None = None,
    ) -> Iterator[tuple[Tensor, "Comparison"]]:
        """Updates its part of the cache, and returns blocks of the model's logits (B, Q, V) with what the memory finds
        at their columns; arguments as in `forward`.
        """
        keys, history = self._read(mlp_inputs, tokens, logits_of, layout, past_key_values)
        return self._compare_blocks(keys, history, logits_of, keys.shape[1] - num_kept)

    def _read(self, mlp_inputs, tokens, logits_of, layout, past_key_values) -> tuple[Tensor, "History"]:
        """Returns the keys (B, T, K) of a call and its entries, and updates the cache."""
        shape, columns = mlp_inputs.shape[:2], layout.columns
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        state = None if cache is None else cache.state_before_call(self._read_again)
        before = self.initial_state(shape[0], mlp_inputs.dtype) if state is None else state
        places = Places.of(columns, shape, mlp_inputs.device)
        keys = self.keys(mlp_inputs)
        if logits_of is None:
            inputs = torch.cat([torch.zeros_like(keys), keys.new_full((*shape, 1 + self.num_expected), -1)], dim=-1)
        else:
            record = cache is not None and cache.record_past
            found = self._find_surprises(logits_of, tokens, places, record, cache is not None)
            first = (tokens[..., None] != before.entries.expected[:, None]).all(-1)  # after the cache's last token
            surprising = torch.where(places.previous == IN_CACHE, first, found.surprising)
            # In float32, which holds all numbers of tokens exactly: inputs that a crop reads again are one tensor.
            stored = torch.where(surprising & columns.learns, tokens, -1)[..., None]
            inputs = torch.cat([keys, stored.to(keys.dtype), found.expected.to(keys.dtype)], dim=-1)
        history, after = self._write(inputs, before, places)
        if cache is not None:
            cache.finish_call(state, after, inputs, columns)
        return keys, history

    def _read_again(self, record: RecordedColumns, state: LayerState | None) -> LayerState:
        """Returns the state after recorded columns, from `state`, None before the first token."""
        inputs = record.inputs
        state = self.initial_state(len(inputs), self.center.dtype) if state is None else state
        return self._write(inputs, state, Places.of(record.columns, inputs.shape[:2], inputs.device))[1]

    @torch.no_grad()
    def _find_surprises(
        self, logits_of: Callable, tokens: Tensor, places: "Places", all_expected: bool, last_expected: bool
    ) -> "Surprises":
        """Finds the tokens whose loss after the token before, of the same call, is at least the threshold.

        The tokens that would be no surprise after a column, those with a smaller loss, are found for all columns, or
        for the last token of each row alone, or for none.
        """
        (batch_size, length), threshold = tokens.shape, self.config.token_memory_threshold
        next_tokens = places.scatter_to_previous(tokens)
        losses, expected, last = [], [], places.latest
        of_last = tokens.new_full((batch_size, 1, self.num_expected), -1)
        for begin, end in blocks(0, length):
            logits = logits_of(begin, end)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            log_z = logits.logsumexp(-1, keepdim=True)
            losses.append((log_z - logits.gather(-1, next_tokens[:, begin:end, None]))[..., 0])
            if all_expected:
                expected.append(self._expected(logits, log_z))
            elif last_expected:
                at = (last - begin).clamp(0, end - begin - 1)[..., None]
                found = self._expected(logits.gather(1, at.expand(-1, -1, logits.shape[-1])), log_z.gather(1, at))
                is_here = (last >= begin) & (last < end)
                of_last = torch.where(is_here[..., None], found, of_last)
        surprising = torch.cat(losses, dim=1).gather(1, places.previous.clamp(min=0)) >= threshold
        known = (tokens >= 0) & (places.previous >= 0)
        if all_expected:
            return Surprises(surprising & known, torch.cat(expected, dim=1))
        is_last = torch.arange(length, device=tokens.device) == last
        return Surprises(surprising & known, torch.where(is_last[..., None], of_last, -1))

    def _expected(self, logits: Tensor, log_z: Tensor) -> Tensor:
        """Returns the tokens (..., S) whose loss is below the threshold, -1 beyond: there are fewer than e^threshold,
        because their probabilities are above e^-threshold.
        """
        largest, tokens = logits.topk(self.num_expected, dim=-1)
        return torch.where(log_z - largest < self.config.token_memory_threshold, tokens, -1)

    def _write(self, inputs: Tensor, state: LayerState, places: "Places") -> tuple["History", LayerState]:
        """Returns all entries during the columns `inputs` (B, T, K + 1 + S), and the state after them.

        inputs: keys; tokens to be written, -1 for none; expected tokens after each column.
        """
        keys, tokens, expected = inputs.split([inputs.shape[-1] - 1 - self.num_expected, 1, self.num_expected], dim=-1)
        keys, ring = keys.to(state.conv_state.dtype), state.entries
        tokens, expected = tokens[..., 0].to(ring.tokens.dtype), expected.to(ring.expected.dtype)
        number, length = ring.tokens.shape[1], tokens.shape[1]
        previous_keys = _take(state.conv_state, keys, places.previous)
        # A key of zeros is none: the first token of a document is not written.
        written = places.is_token & (tokens >= 0) & (previous_keys != 0).any(-1)
        counts = written.cumsum(1)
        slots = torch.where(written, number - 1 + counts, number + length)  # the last slot is dropped
        extended = (_extend(ring.keys, length + 1, 0), _extend(ring.tokens, length + 1, -1))
        all_keys = extended[0].scatter(1, slots[..., None].expand_as(previous_keys), previous_keys)[:, :-1]
        all_tokens = extended[1].scatter(1, slots, tokens)[:, :-1]
        oldest = torch.where(places.begin < 0, 0, number + counts.gather(1, places.begin.clamp(min=0)))
        history = History(all_keys, all_tokens, counts, oldest, number)
        entries = TokenEntries(*history.ring_after(), _take(ring.expected[:, None], expected, places.latest)[:, 0])
        num_seen = places.num_tokens() + torch.where(places.begin[:, -1] < 0, state.memory.num_seen, 0)
        last_key = _take(state.conv_state, keys, places.latest)
        return history, LayerState(MemoryState((), (), (), num_seen), last_key, entries=entries)

    def _compare_blocks(
        self, queries: Tensor, history: "History", logits_of: Callable, first: int
    ) -> Iterator[tuple[Tensor, "Comparison"]]:
        """Yields logits (B, Q, V) and comparisons of blocks of columns from `first` on; queries (B, T, K)."""
        for begin, end in blocks(first, queries.shape[1]):
            logits = logits_of(begin, end)
            yield logits, self._compare(queries[:, begin:end], history.entries(begin, end), logits)

    def _compare(self, queries: Tensor, entries: "VisibleEntries", logits: Tensor) -> "Comparison":
        """Compares queries (B, Q, K) with the entries; logits (B, Q, V), of the model."""
        dtype, any_visible = queries.dtype, entries.visible.any(-1)
        with maybe_autocast(queries.device.type, enabled=False):
            similarity = queries @ entries.keys.to(dtype).mT  # (B, Q, K) @ (B, K, E)
        scores = self.log_sharpness.to(dtype).exp() * similarity
        scores = scores.masked_fill(~entries.visible & any_visible[..., None], -torch.inf)  # finite where none is
        weights = scores.softmax(-1)  # a: (B, Q, E)
        tokens = entries.tokens.clamp(min=0).long()[:, None].expand_as(weights)
        # m of each entry's token, summed over a vocabulary: an entry has its token's whole share.
        shares = torch.zeros_like(logits, dtype=dtype).scatter_add(-1, tokens, weights)
        shares = shares.gather(-1, tokens).clamp(min=torch.finfo(dtype).tiny)
        log_p = logits.to(dtype).log_softmax(-1)
        largest = shares.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
        number = entries.visible.sum(-1).clamp(min=1).to(dtype)
        features = (scores.logsumexp(-1), largest, -(log_p.exp() * log_p).sum(-1), number.log())
        features = torch.stack([x / unit for x, unit in zip(features, UNITS, strict=True)], dim=-1)
        return Comparison(features, any_visible, tokens, weights, shares, log_p)

    def _mix(self, logits: Tensor, found: "Comparison") -> Tensor:
        """Computes log((1 - l) p + l m) + log Z (B, Q, V) from the model's logits."""
        dtype = found.weights.dtype
        gate = (found.features * self.gate_weight.to(dtype)).sum(-1) + self.gate_bias.to(dtype)
        gate = torch.where(found.any_visible, gate, -torch.inf)[..., None]  # logit of l
        # log((1 - l) p + l m) = log p + log(1 - l) + log(1 + e^r),  r = log(l / (1 - l)) + log m - log p
        ratio = gate + found.shares.log() - found.log_p.gather(-1, found.tokens)
        rise = torch.logaddexp(ratio, torch.zeros_like(ratio))
        # Entries with the same token add up to its rise; their parts add up to 1, so they need no gradient.
        parts = (found.weights / found.shares).detach()
        return (logits.to(dtype) + logsigmoid(-gate)).scatter_add(-1, found.tokens, parts * rise).to(logits.dtype)


class Places(NamedTuple):
    """Where the tokens of a call are, for B rows of T columns.

    is_token: (B, T) bool, False at padding. begin: (B, T) int64, first column of the column's document; -1 if it is the
    document of the cache. previous: (B, T), the column of the token before, of the same document; IN_CACHE, or NONE.
    latest: (B, 1), the column of the row's last token, likewise.
    """

    is_token: Tensor
    begin: Tensor
    previous: Tensor
    latest: Tensor

    @classmethod
    def of(cls, columns: Columns, shape: tuple[int, int], device: torch.device) -> "Places":
        """Returns the places of the tokens of a call with `columns`."""
        at = torch.arange(shape[1], device=device).expand(shape)
        mask, starts = (None if x is None else x.to(device) for x in (columns.mask, columns.document_starts))
        is_token = at >= 0 if mask is None else mask
        begin = torch.full_like(at, -1) if starts is None else torch.where(starts, at, -1).cummax(1).values
        last = torch.where(is_token, at, -1).cummax(1).values
        previous = pad(last[:, :-1], (1, 0), value=-1)
        previous, latest = (torch.where(x >= begin, x, NONE) for x in (previous, last))
        return cls(is_token, begin, previous, latest[:, -1:])

    def scatter_to_previous(self, tokens: Tensor) -> Tensor:
        """Returns the next token of every token (B, T), 0 where the call has none."""
        has_previous = self.is_token & (self.previous >= 0) & (tokens >= 0)
        index = torch.where(has_previous, self.previous, tokens.shape[1])  # of a column that is dropped
        return tokens.new_zeros(tokens.shape[0], tokens.shape[1] + 1).scatter(1, index, tokens)[:, :-1]

    def num_tokens(self) -> Tensor:
        """Returns the number of tokens (B,) of each row's last document in this call."""
        in_last = self.begin == self.begin[:, -1:]
        return (self.is_token & in_last).sum(1)


class Surprises(NamedTuple):
    """surprising: (B, T) bool, True at tokens to be written; expected: (B, T, S), tokens that would not be after the
    column, -1 beyond them.
    """

    surprising: Tensor
    expected: Tensor


class History(NamedTuple):
    """All entries during a call: keys (B, N + T, K) and tokens (B, N + T), oldest first: those of the ring before, then
    those that the call writes. counts: (B, T), how many were written up to a column. oldest: (B, T), the first entry
    that belongs to the column's document. ring_size: N.
    """

    keys: Tensor
    tokens: Tensor
    counts: Tensor
    oldest: Tensor
    ring_size: int

    def entries(self, begin: int, end: int) -> "VisibleEntries":
        """Returns the entries that the columns from begin to end see: less than N + end - begin."""
        counts, oldest = self.counts[:, begin:end, None], self.oldest[:, begin:end, None]
        width = self.ring_size + end - begin - 1
        index = counts[:, 0] + torch.arange(width, device=counts.device)
        tokens, places = self.tokens.gather(1, index), index[:, None]
        visible = (places >= counts) & (places >= oldest) & (places < counts + self.ring_size) & (tokens >= 0)[:, None]
        return VisibleEntries(self._keys_at(index), tokens, visible)

    def ring_after(self) -> tuple[Tensor, Tensor]:
        """Returns the keys (B, N, K) and tokens (B, N) of the ring after the call."""
        index = self.counts[:, -1:] + torch.arange(self.ring_size, device=self.counts.device)
        belongs = index >= self.oldest[:, -1:]
        tokens = torch.where(belongs, self.tokens.gather(1, index), -1)
        return torch.where(belongs[..., None], self._keys_at(index), 0), tokens

    def _keys_at(self, index: Tensor) -> Tensor:
        return self.keys.gather(1, index[..., None].expand(-1, -1, self.keys.shape[-1]))


class Comparison(NamedTuple):
    """What the memory finds at Q columns: the features f of the read gate (B, Q, 4); any_visible (B, Q) bool, whether
    there is an entry; tokens, weights, shares (B, Q, E): of every entry its token, a, and m of its token; log_p
    (B, Q, V), of the model.
    """

    features: Tensor
    any_visible: Tensor
    tokens: Tensor
    weights: Tensor
    shares: Tensor
    log_p: Tensor


class VisibleEntries(NamedTuple):
    """keys (B, E, K), tokens (B, E); visible (B, Q, E) bool, True where the entry is in the ring at the column."""

    keys: Tensor
    tokens: Tensor
    visible: Tensor


def blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the bounds of blocks of BLOCK columns."""
    for start in range(begin, end, BLOCK):
        yield start, min(start + BLOCK, end)


def _take(before: Tensor, x: Tensor, index: Tensor) -> Tensor:
    """Returns (B, I, D) the entries of x (B, T, D) at index (B, I): that of `before` (B, 1, D) for IN_CACHE, 0 for
    NONE.
    """
    extended = torch.cat([torch.zeros_like(before), before, x], dim=1)
    return extended.gather(1, (index - NONE)[..., None].expand(-1, -1, x.shape[-1]))


def _extend(x: Tensor, length: int, value: int) -> Tensor:
    """Appends `length` entries of `value` to x (B, N, ...)."""
    return torch.cat([x, x.new_full((x.shape[0], length, *x.shape[2:]), value)], dim=1)

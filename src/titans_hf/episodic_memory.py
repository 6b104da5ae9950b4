"""The episodic token memory: remembers which token followed where, if that token was a surprise, and mixes what it
remembers with the model's distribution of the next token.

With y_t the input of the last layer's feed-forward network, x_t the tokens, p_t the model's distribution after x_t:

    k_t = W (y_t - c) / |W (y_t - c)|
    s_t = -log p_{t-1}(x_t), the surprise
    the entry i = (k_{t-1}, x_{t-4} ... x_{t-1}, x_t, s_t) is written if s_t >= threshold
    a_ti = softmax_i(beta k_t k_i + u e_ti),  m_t(v) = sum of a_ti over the entries i whose token is v
    l_t = sigmoid(w f_t + b)
    output logits = log((1 - l_t) p_t + l_t m_t) + log Z_t

Entries are in a ring: i runs over the newest N entries that were written up to x_t. Their keys are rounded to 8 bits,
and have no gradient; k_t has one. Only surprising tokens are written: the model knows the others already. e_ti are
seven facts about an entry: log p_t of its token, so that the memory chooses among tokens that the model thinks
possible; its surprise; whether its token has left the window of attention; and whether the last 1, 2, 3 and 4 tokens up
to x_t are the tokens that came before the entry's token, because a repeated phrase goes on as it did before. f_t are
eight features: s, the log of the sum of exp(scores); m, which is m_t of the best entry's token; h, the entropy of p_t
in nats; the log of the number of entries; n, the mean over a_t of how many tokens are the same; and the products m s, m
h and m n. The center c, the projection W, the sharpness beta, u, w and b are parameters. Z_t is the sum of exp(logits)
of the model, so that a model that has written nothing has exactly its own logits. The memory belongs to the language
model: a `TitansModel` alone has no p_t, and what it reads leaves no entries. Nor does a token that is given as an
embedding, because it has no number.

An extension beyond the paper.
Shapes: B batch, T columns, N entries of the ring, K key size, D hidden size, V vocabulary, Q columns of a block, E
entries that a block can see.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize, pad
from transformers import initialization
from transformers.utils.generic import maybe_autocast

from .cache_layer import LayerState, RecordedColumns
from .cache_titans import TitansCache
from .configuration_titans import TitansConfig
from .memory_state import MemoryState, map_tensors
from .token_grid import Columns
from .token_layout import TokenLayout

BLOCK = 64  # columns that are compared at once: this bounds the memory needed
IN_CACHE, NONE = -1, -2  # instead of a column: the last token of the cache, no token
KEY_UNITS = 127  # an entry's key is in multiples of 1 / 127: in 8 bits
CONTEXT = 4  # tokens before an entry's token that are compared
UNITS = (10, 1, 4, 5, 2)  # the features of the gate are divided by these, so that each is of the order of 1
# The first beta and u: rounded results of a fit to novels.
INITIAL_SHARPNESS = 9.0
INITIAL_ENTRY_WEIGHT = (0.3, 0.3, 2.0, 1.0, 1.0, 1.0, 1.0)
INITIAL_GATE = -5.0  # a new memory has at most a share of sigmoid(-5) = .007


@dataclass
class TokenEntries:
    """Entries of the episodic token memory, oldest first.

    tokens: (B, N) int32, the token of each entry; -1 in a slot without an entry. keys: (B, N, K) int8, 127 times the
    key of the token before the entry's token. contexts: (B, N, 4) int32, the four tokens before the entry's token, the
    latest first; -1 before the first token. positions: (B, N) int32, in the document. losses: (B, N), in nats.
    """

    keys: Tensor
    tokens: Tensor
    contexts: Tensor
    positions: Tensor
    losses: Tensor

    def at(self, index: Tensor) -> "TokenEntries":
        """Returns the entries at index (B, I)."""
        return map_tensors(lambda x: x.gather(1, columns_like(index, x).expand(-1, -1, *x.shape[2:])), self)


def columns_like(index: Tensor, x: Tensor) -> Tensor:
    """Returns index (B, I) with as many dimensions as x (B, N, ...)."""
    return index.view(*index.shape, *(1,) * (x.dim() - 2))


@dataclass
class EntryRing:
    """The ring of the episodic token memory, and last_tokens: (B, 4) int32, the last tokens read, the latest first; -1
    before the first token.
    """

    entries: TokenEntries
    last_tokens: Tensor

    def merged(self, other: "EntryRing", weight: float) -> "EntryRing":
        """Returns a ring with the newest entries of both rings, mixed by age: a share `weight` of them from `other`, or
        more if this ring has too few. The entries of `other` count as far away from every later token.
        """
        ours, theirs = self.entries, other.entries
        theirs = replace(theirs, positions=torch.full_like(theirs.positions, torch.iinfo(torch.int32).min // 2))
        both = map_tensors(lambda x, y: torch.cat([x, y.to(x.device).expand_as(x)], dim=1), ours, theirs)
        number = ours.tokens.shape[1]
        # The newest entry has the rank 1/2.
        rank = torch.arange(number, 0, -1, device=ours.keys.device, dtype=torch.float64) - 0.5
        age = torch.cat([rank / max(share, 1e-9) for share in (1 - weight, weight)])
        age = torch.where(both.tokens < 0, torch.inf, age)
        return replace(self, entries=both.at(age.argsort(dim=1, stable=True)[:, :number].flip(1)))


class EpisodicMemory(nn.Module):
    """Writes the surprising tokens of a call, and mixes the model's logits with what follows in like contexts."""

    PARAMETERS = ("center", "projection", "log_sharpness", "entry_weight", "gate_weight", "gate_bias")

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        size = config.token_memory_key_size
        self.input_size = size + config.hidden_size + 3
        self.center = nn.Parameter(torch.zeros(config.hidden_size))
        self.projection = nn.Parameter(torch.empty(config.hidden_size, size))
        self.log_sharpness = nn.Parameter(torch.empty(1))
        self.entry_weight = nn.Parameter(torch.empty(len(INITIAL_ENTRY_WEIGHT)))
        self.gate_weight = nn.Parameter(torch.zeros(len(UNITS) + 3))
        self.gate_bias = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self, init=initialization) -> None:
        """Initialises with the functions of `init`."""
        init.zeros_(self.center)
        init.normal_(self.projection, std=self.config.hidden_size**-0.5)
        init.constant_(self.log_sharpness, math.log(INITIAL_SHARPNESS))
        init.copy_(self.entry_weight, torch.tensor(INITIAL_ENTRY_WEIGHT))
        init.zeros_(self.gate_weight)
        init.constant_(self.gate_bias, INITIAL_GATE)

    def initial_state(self, batch_size: int, dtype: torch.dtype) -> LayerState:
        """Returns the state before the first token: an empty ring; conv_state (B, 1, K + D): the key and the hidden
        state of the token before, zeros where there is none.
        """
        ring, size = self.config.token_memory_entries, self.config.token_memory_key_size
        zeros = partial(self.center.new_zeros, dtype=dtype)
        none = partial(self.center.new_full, fill_value=-1, dtype=torch.int32)
        keys = self.center.new_zeros((batch_size, ring, size), dtype=torch.int8)
        memory = MemoryState((), (), (), self.center.new_zeros(batch_size, dtype=torch.int64))
        numbers = (none(shape) for shape in ((batch_size, ring), (batch_size, ring, CONTEXT), (batch_size, ring)))
        entries = TokenEntries(keys, *numbers, zeros((batch_size, ring)))
        vectors = zeros((batch_size, 1, size + self.config.hidden_size))
        return LayerState(memory, vectors, entries=EntryRing(entries, none((batch_size, CONTEXT))))

    def keys(self, mlp_inputs: Tensor) -> Tensor:
        """Computes k (B, T, K), in float32 at least, from y (B, T, D)."""
        dtype = torch.promote_types(mlp_inputs.dtype, torch.float32)
        centred = mlp_inputs.to(dtype) - self.center.to(dtype)
        with maybe_autocast(mlp_inputs.device.type, enabled=False):
            return normalize(centred @ self.projection.to(dtype), dim=-1)  # (B, T, D) @ (D, K)

    def forward(
        self,
        mlp_inputs: Tensor,
        hidden_states: Tensor,
        tokens: Tensor | None,
        head: Callable[[Tensor], Tensor] | None,
        num_kept: int,
        layout: TokenLayout,
        cache: TitansCache | None = None,
    ) -> Tensor | None:
        """Mixes the logits of the last `num_kept` columns, (B, num_kept, V), and updates its part of the cache.

        Args:
            mlp_inputs (B, T, D): y.
            hidden_states (B, T, D): the inputs of the LM head.
            tokens (B, T) int64: x; -1 for a token that is given as an embedding.
            head: the LM head. None if there is none: nothing is written then, and None is returned.
        """
        found = self.comparisons(mlp_inputs, hidden_states, tokens, head, num_kept, layout, cache)
        if head is None:
            return None
        return torch.cat([self._mix(logits, found_here) for logits, found_here in found], dim=1)

    def comparisons(
        self,
        mlp_inputs: Tensor,
        hidden_states: Tensor,
        tokens: Tensor | None,
        head: Callable[[Tensor], Tensor] | None,
        num_kept: int,
        layout: TokenLayout,
        cache: TitansCache | None = None,
        wanted: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, "Found"]]:
        """Updates its part of the cache, and returns blocks of the model's logits (B, Q, V) with what the memory finds
        at their columns; arguments as in `forward`. wanted (T,) bool: of the last `num_kept` columns, only where True.
        """
        shape, columns, device = mlp_inputs.shape[:2], layout.columns, mlp_inputs.device
        layer = None if cache is None else cache.layers[self.layer_idx]
        state, recorded = (None, ()) if layer is None else layer.state_before_call()
        for run in recorded:
            state = self._read_again(run, state)
        before = self.initial_state(shape[0], mlp_inputs.dtype) if state is None else state
        places, keys = Places.of(columns, shape, device), self.keys(mlp_inputs)
        hidden_states = hidden_states.to(device)
        tokens = torch.full(shape, -1, device=device) if tokens is None else tokens
        losses = keys.new_full(shape, -1.0)
        if head is not None:
            last = before.conv_state[..., keys.shape[-1] :].to(hidden_states.dtype)
            states = torch.cat([last, hidden_states], dim=1)
            logits, losses = self._logits_and_losses(states, tokens, head, num_kept, places)
        writes = columns.learns and self.config.memory_max_lr > 0
        is_surprise = (losses >= self.config.token_memory_threshold) & writes
        # In float32, which holds all numbers of tokens exactly: inputs that a crop reads again are one tensor.
        parts = (hidden_states, is_surprise[..., None], losses[..., None], tokens[..., None])
        inputs = torch.cat([keys, *(x.to(keys.dtype) for x in parts)], dim=-1)
        history, after = self._write(inputs, before, places)
        if layer is not None:
            layer.finish_call(state, after, inputs, columns)
        return iter(()) if head is None else self._compare_blocks(keys, history, logits, wanted)

    def _read_again(self, record: RecordedColumns, state: LayerState | None) -> LayerState:
        """Returns the state after recorded columns, from `state`, None before the first token."""
        inputs = record.inputs
        state = self.initial_state(len(inputs), self.center.dtype) if state is None else state
        return self._write(inputs, state, Places.of(record.columns, inputs.shape[:2], inputs.device))[1]

    def _logits_and_losses(
        self, hidden_states: Tensor, tokens: Tensor, head: Callable, num_kept: int, places: "Places"
    ) -> tuple[Tensor, Tensor]:
        """Computes the logits of the last `num_kept` columns, (B, num_kept, V), and the loss of each token (B, T) after
        the token before, without gradient; -1 where there is no token before.

        hidden_states (B, 1 + T, D): first that of the last token of the cache. The head runs once for every column.
        """
        length = hidden_states.shape[1]
        rest = 0 if num_kept == length - 1 else length - num_kept  # the columns before the kept ones
        kept, next_tokens = head(hidden_states[:, rest:]).to(tokens.device), places.next_tokens(tokens)
        with torch.no_grad():
            not_kept = (head(hidden_states[:, a:b]).to(tokens.device) for a, b in blocks(0, rest))
            losses = []  # a loss for each column: that of the token after it
            for logits in (*not_kept, *(kept[:, a:b] for a, b in blocks(0, kept.shape[1]))):
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                begin = sum(x.shape[1] for x in losses)
                targets = next_tokens[:, begin : begin + logits.shape[1], None]
                losses.append(logits.logsumexp(-1) - logits.gather(-1, targets)[..., 0])
            losses = torch.cat(losses, dim=1).gather(1, (places.previous + 1).clamp(min=0)).clamp(min=0)
            known = places.is_token & (places.previous != NONE) & (tokens >= 0)
        return kept[:, -num_kept:], torch.where(known, losses, -1.0)

    def _write(self, inputs: Tensor, state: LayerState, places: "Places") -> tuple["History", LayerState]:
        """Returns all entries during the columns `inputs` (B, T, K + D + 3), and the state after them.

        inputs: keys; hidden states; 1 where the token is a surprise; its loss; the token.
        """
        ring, before = state.entries.entries, state.entries.last_tokens
        vectors, size = inputs[..., :-3].to(state.conv_state.dtype), ring.keys.shape[-1]
        is_surprise, losses, tokens = inputs[..., -3:].unbind(-1)
        tokens = tokens.to(before.dtype)
        number, length = ring.tokens.shape[1], tokens.shape[1]
        previous_keys = _take(state.conv_state[..., :size], vectors[..., :size], places.previous)
        recent = _recent_tokens(before, tokens, places)
        # A key of zeros is none: the first token of a document is not written.
        written = places.is_token & (is_surprise > 0) & (previous_keys != 0).any(-1)
        counts = written.cumsum(1)
        slots = torch.where(written, number - 1 + counts, number + length)  # the last slot is dropped
        positions = places.positions(state.memory.num_seen).to(before.dtype)
        rounded = (previous_keys * KEY_UNITS).round().to(ring.keys.dtype)
        new = TokenEntries(rounded, tokens, recent[..., 1:], positions, losses.to(ring.losses.dtype))
        entries = map_tensors(partial(_append, slots=slots), ring, new)
        oldest = torch.where(places.begin < 0, 0, number + counts.gather(1, places.begin.clamp(min=0)))
        history = History(entries, recent[..., :-1], positions, counts, oldest, number)
        last_tokens = _take(before[:, None] + 1, recent[..., :-1] + 1, places.latest)[:, 0] - 1  # -1 where NONE
        last_vectors = _take(state.conv_state, vectors, places.latest)
        num_seen = places.num_tokens() + torch.where(places.begin[:, -1] < 0, state.memory.num_seen, 0)
        after = EntryRing(history.ring_after(), last_tokens)
        return history, LayerState(MemoryState((), (), (), num_seen), last_vectors, entries=after)

    def _compare_blocks(
        self, queries: Tensor, history: "History", logits: Tensor, wanted: Tensor | None
    ) -> Iterator[tuple[Tensor, "Found"]]:
        """Yields logits (B, Q, V) of blocks of columns that have logits, and what they find; queries (B, T, K)."""
        first = queries.shape[1] - logits.shape[1]
        for begin, end in blocks(first, queries.shape[1]):
            entries, visible = history.visible(begin, end)
            of_columns = (queries, history.recent, history.positions[..., None])
            query, recent, position = (x[:, begin:end] for x in of_columns)
            of_block = logits[:, begin - first : end - first]
            if wanted is not None:
                here = wanted[begin:end]
                query, recent, position, of_block, visible = (
                    x[:, here] for x in (query, recent, position, of_block, visible)
                )
            with maybe_autocast(query.device.type, enabled=False):
                similarity = query / KEY_UNITS @ entries.keys.to(query.dtype).mT  # (B, Q, K) @ (B, K, E)
            log_p = of_block.to(query.dtype).log_softmax(-1)
            of_entries = log_p.gather(-1, entries.tokens.clamp(min=0).long()[:, None].expand_as(similarity))
            far = position - entries.positions[:, None] > self.config.kv_cache_length
            facts = (of_entries, entries.losses[:, None], far, _number_same(recent, entries.contexts))
            entropy = -(log_p.exp() * log_p).sum(-1)
            yield of_block, Found(similarity, facts, visible, entries.tokens[:, None], entropy)

    def _mix(self, logits: Tensor, found: "Found") -> Tensor:
        """Computes log((1 - l) p + l m) + log Z (B, Q, V) from the model's logits."""
        dtype = found.similarity.dtype
        features, weights = found.read(self.log_sharpness.to(dtype), self.entry_weight.to(dtype))
        # m of each entry's token, summed over a vocabulary: an entry has its token's whole share.
        tokens = found.tokens.clamp(min=0).long().expand_as(weights)
        shares = torch.zeros_like(logits, dtype=dtype).scatter_add(-1, tokens, weights)
        shares = shares.gather(-1, tokens).clamp(min=torch.finfo(dtype).tiny)
        gate = (features * self.gate_weight.to(dtype)).sum(-1) + self.gate_bias.to(dtype)
        gate = torch.where(found.visible.any(-1), gate, -torch.inf)[..., None]  # logit of l
        # log((1 - l) p + l m) = log p + log(1 - l) + log(1 + e^r),  r = log(l / (1 - l)) + log m - log p
        ratio = gate + shares.log() - found.facts[0]
        rise = torch.logaddexp(ratio, torch.zeros_like(ratio))
        # Entries with the same token add up to its rise; their parts add up to 1, so they need no gradient.
        parts = (weights / shares).detach()
        return (logits.to(dtype) + logsigmoid(-gate)).scatter_add(-1, tokens, parts * rise).to(logits.dtype)


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

    def next_tokens(self, tokens: Tensor) -> Tensor:
        """Returns the tokens (B, 1 + T) after the cache's last token and after each, 0 where the call has none."""
        has_previous = self.is_token & (self.previous != NONE) & (tokens >= 0)
        # Tokens without a token before them go to a last column, which is dropped.
        index = torch.where(has_previous, self.previous + 1, tokens.shape[1] + 1)
        return tokens.new_zeros(tokens.shape[0], tokens.shape[1] + 2).scatter(1, index, tokens)[:, :-1]

    def positions(self, num_seen: Tensor) -> Tensor:
        """Returns how many tokens of its document are before each token (B, T), after `num_seen` (B,) of the cache."""
        numbers = self.is_token.cumsum(1) - self.is_token.long()
        of_begin = numbers.gather(1, self.begin.clamp(min=0))
        return torch.where(self.begin < 0, numbers + num_seen[:, None], numbers - of_begin)

    def num_tokens(self) -> Tensor:
        """Returns the number of tokens (B,) of each row's last document in this call."""
        in_last = self.begin == self.begin[:, -1:]
        return (self.is_token & in_last).sum(1)


class History(NamedTuple):
    """entries: all entries during a call, N + T of them, oldest first: those of the ring before, then those that the
    call writes. recent: (B, T, 4), the last tokens up to a column, the latest first, -1 where there is none. positions:
    (B, T), of the columns in their documents. counts: (B, T), how many entries were written up
    to a column. oldest: (B, T), the first entry that belongs to the column's document. ring_size: N.
    """

    entries: TokenEntries
    recent: Tensor
    positions: Tensor
    counts: Tensor
    oldest: Tensor
    ring_size: int

    def visible(self, begin: int, end: int) -> tuple[TokenEntries, Tensor]:
        """Returns the entries that the columns from begin to end see, E < N + end - begin, and (B, Q, E) bool, True
        where the entry is in the ring at the column.
        """
        counts, oldest = self.counts[:, begin:end, None], self.oldest[:, begin:end, None]
        width = self.ring_size + end - begin - 1
        index = counts[:, 0] + torch.arange(width, device=counts.device)
        entries, places = self.entries.at(index), index[:, None]
        visible = (places >= counts) & (places >= oldest) & (places < counts + self.ring_size)
        return entries, visible & (entries.tokens >= 0)[:, None]

    def ring_after(self) -> TokenEntries:
        """Returns the N entries of the ring after the call."""
        index = self.counts[:, -1:] + torch.arange(self.ring_size, device=self.counts.device)
        belongs = index >= self.oldest[:, -1:]
        return map_tensors(lambda x: torch.where(columns_like(belongs, x), x, _empty(x)), self.entries.at(index))


class Found(NamedTuple):
    """What Q columns find in the ring: similarity (B, Q, E), k_t k_i; facts of e_ti, which expand to (B, Q, E): log
    p_t, surprise, whether it is far, and how many of the tokens before are the same; visible (B, Q, E) bool; tokens
    (B, 1, E) of the entries, -1 where there is none; entropy (B, Q) of p in nats.
    """

    similarity: Tensor
    facts: tuple[Tensor, Tensor, Tensor, Tensor]
    visible: Tensor
    tokens: Tensor
    entropy: Tensor

    def seen(self) -> "Found":
        """Drops entries no query can see (batch size 1)."""
        seen = self.visible[0].any(0)
        return map_tensors(lambda x: x[..., seen], self._replace(entropy=None))._replace(entropy=self.entropy)

    def read(self, log_sharpness: Tensor, entry_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the features f of the gate (B, Q, 8) and the weights a of the entries (B, Q, E)."""
        dtype, any_visible = self.similarity.dtype, self.visible.any(-1, keepdim=True)
        scores = log_sharpness.exp() * self.similarity
        *facts, num_same = self.facts
        facts += [num_same >= number for number in range(1, CONTEXT + 1)]
        for weight, fact in zip(entry_weight, facts, strict=True):
            scores = scores + weight * fact.to(dtype)
        scores = scores.masked_fill(~self.visible & any_visible, -torch.inf)  # finite where none is
        weights = scores.softmax(-1)
        best = self.tokens.expand(scores.shape).gather(-1, scores.argmax(-1, keepdim=True))
        largest = torch.where(self.tokens == best, weights, 0).sum(-1)
        number = self.visible.sum(-1).clamp(min=1).to(dtype)
        mean_same = (weights * num_same).sum(-1)
        features = (scores.logsumexp(-1), largest, self.entropy, number.log(), mean_same)
        s, m, h, count, n = (x / unit for x, unit in zip(features, UNITS, strict=True))
        return torch.stack([s, m, h, count, n, m * s, m * h, m * n], dim=-1), weights


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


def _recent_tokens(before: Tensor, tokens: Tensor, places: Places) -> Tensor:
    """Returns the last tokens (B, T, 1 + 4) up to each column, the latest first, -1 where there is none, from the
    tokens (B, T) and the last tokens of the cache, before (B, 4).
    """
    found = [tokens + 1]  # `_take` returns 0 for NONE
    for lag in range(CONTEXT):
        found.append(_take(before[:, lag, None, None] + 1, found[-1][..., None], places.previous)[..., 0])
    return torch.stack(found, dim=-1) - 1


def _number_same(recent: Tensor, contexts: Tensor) -> Tensor:
    """Counts (B, Q, E) how many of the last tokens, recent (B, Q, 4), are those before an entry, contexts (B, E, 4), up
    to the first that is not.
    """
    same, number = True, 0
    for lag in range(CONTEXT):
        token = recent[..., lag, None]
        same = (token == contexts[:, None, :, lag]) & (token >= 0) & same
        number = number + same.to(torch.int8)
    return number


def _append(old: Tensor, new: Tensor, slots: Tensor) -> Tensor:
    """Puts new (B, T, ...) at slots (B, T) behind old (B, N, ...): (B, N + T, ...). Slot N + T is dropped."""
    free = torch.full_like(new[:, :1], _empty(new)).expand(-1, new.shape[1] + 1, *new.shape[2:])
    return torch.cat([old, free], dim=1).scatter(1, columns_like(slots, new).expand_as(new), new)[:, :-1]


def _empty(x: Tensor) -> int:
    """Returns what stands in a slot without an entry: no token, no position, a key and a loss of 0."""
    return -1 if x.dtype == torch.int32 else 0

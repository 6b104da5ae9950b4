"""The short-term memory: sliding-window attention (MAG, MAL) and segment attention (MAC), both with persistent tokens.

The cost is linear in the sequence length: queries are processed in blocks of one window (or segment), and no score or
mask larger than a block is formed. Rotary positions are relative to the block, so none exceeds two windows at any
context length. Persistent keys are outside of the window. With `persistent_distance` they are rotated to that distance
behind every query, and compared with the query before its rotation. Without it, persistent keys carry no rotary
position: with partial rotation they are compared with the unrotated part of the query; with full rotation, with the
query before rotation.
Eager attention, whose weights are recorded, and the masks for the other values of `attn_implementation` come first.
docs/dev/log.md: "Rotary positions relative to the block", "Persistent keys where a whole head is rotated"

Shapes: B batch, T query slots, K key slots, P persistent tokens, W window, L segment length, h heads, D head size.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache_layer import KeyValueCache
from .configuration_titans import TitansConfig
from .neural_memory import OutputProjection
from .token_grid import TokenGrid


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, arrange=None, **kwargs):
    """Computes attention without a fused kernel, for `attn_implementation="eager"` and to return attention weights;
    boolean mask. `arrange` reorders the returned weights.
    """
    key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    scores = query @ key.mT * scaling  # (B, h, T, D) @ (B, h, D, K)
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    arranged = arrange(weights)
    # The values are multiplied by the weights that are returned, so that outputs have a gradient with respect to them.
    weights = _undo(arrange, arranged, weights.shape)
    return (weights @ value).transpose(1, 2), arranged


def _undo(arrange: Callable[[Tensor], Tensor], arranged: Tensor, shape: torch.Size) -> Tensor:
    """Returns x (B, h, T, K) of the given shape with arrange(x) = arranged, zero at entries that `arrange` omits."""
    size = shape[2] * shape[3]
    origin = arrange(torch.arange(1, size + 1, device=arranged.device).view(1, 1, *shape[2:]))  # 0: not from x
    flat = arranged.new_zeros(*shape[:2], size + 1)
    return flat.scatter(2, origin.flatten(2).expand(*shape[:2], -1), arranged.flatten(2))[..., 1:].view(shape)


def mask_for(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a mask, True where a query attends, to the form that an attention implementation is registered with: a
    boolean mask, or one that is added to the scores.

    Raises ValueError for an implementation that is registered without either form.
    """
    form = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if form is eager_mask:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    if form is not sdpa_mask:
        raise ValueError(
            f"`attn_implementation` {name!r} must be registered with `eager_mask` or `sdpa_mask` of transformers ("
            f"AttentionMaskInterface.register), but its masks are {form}: a Titans model masks windows itself."
        )
    return mask


class AttentionOutput(NamedTuple):
    """hidden_states (B, T, hidden); the attention weights, None if they are not recorded; the cache after the call."""

    hidden_states: Tensor
    weights: Tensor | None
    kv_cache: KeyValueCache


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to the first rotary_dim entries of x (B, N, h, D); cos, sin (..., N, 1, rotary_dim)."""
    rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    half = torch.cat([-second, first], dim=-1)
    return torch.cat([torch.addcmul(rotated * cos, half, sin), rest], dim=-1)


class TitansAttention(nn.Module):
    """Projections, persistent keys and the attention interface, common to both forms."""

    is_causal = True

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        query_size, key_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = OutputProjection(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None for _ in range(2)
        )

    def project_queries(self, hidden_states: Tensor) -> Tensor:
        """Computes queries without rotation: (B, N, hidden) -> (B, N, h, D)."""
        queries = self._heads(self.q_proj(hidden_states))
        return queries if self.q_norm is None else self.q_norm(queries)

    def project_keys_and_values(self, hidden_states: Tensor) -> KeyValueCache:
        """Computes keys without rotation and values: (B, N, hidden) -> (B, N, h, D) each."""
        keys, values = self._heads(self.k_proj(hidden_states)), self._heads(self.v_proj(hidden_states))
        return KeyValueCache(keys if self.k_norm is None else self.k_norm(keys), values)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def rotary_factors(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Computes cos and sin of the rotary angles at `positions` (N,) or (B, N): (..., N, 1, rotary_dim) each, the
        same for all heads.
        """
        precise = torch.promote_types(dtype, torch.float32)
        frequencies, scale = self._rotary_frequencies(precise, positions.device)
        angles = positions[..., None].to(precise) * frequencies
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _rotary_frequencies(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
        """Returns the angles of one position (rotary_dim / 2,), and the factor of cos and sin."""
        size, rope = self.config.rotary_dim, self.config.rope_parameters
        if rope["rope_type"] == "default":
            return rope["rope_theta"] ** -(torch.arange(0, size, 2, device=device, dtype=dtype) / size), 1.0
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, device)
        return frequencies.to(dtype), scale

    @property
    def keeps_plain_queries(self) -> bool:
        """True if queries are needed without rotation as well: for persistent keys at a distance, or where a whole head
        is rotated.
        """
        has_distance, rotates_all = self.config.persistent_distance > 0, self.config.rotary_dim == self.head_dim
        return self.config.num_persistent_tokens > 0 and (has_distance or rotates_all)

    def rotate_queries(self, queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates queries (B, T, h, D) for `attend`. If unrotated queries are needed too, they follow the rotated ones:
        (B, T, h, 2 D).
        """
        rotated = rotate(queries, cos, sin)
        return torch.cat([rotated, queries], dim=-1) if self.keeps_plain_queries else rotated

    def initial_kv_cache(self, persistent: Tensor) -> KeyValueCache:
        """Returns the cache before the first token: keys and values of the persistent tokens, then zeros."""
        projected = self.project_keys_and_values(persistent)
        keys, distance = projected.keys, self.config.persistent_distance
        if distance > 0:
            _, scale = self._rotary_frequencies(torch.float32, keys.device)
            cos, sin = self.rotary_factors(torch.full((1,), -distance, device=keys.device), keys.dtype)
            keys = rotate(keys, cos * scale, sin * scale)  # a second time, in place of the query
        elif not self.keeps_plain_queries:
            rotary, rest = keys.split([self.config.rotary_dim, keys.shape[-1] - self.config.rotary_dim], dim=-1)
            keys = torch.cat([torch.zeros_like(rotary), rest], dim=-1)

        def pad(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_zeros(x.shape[0], self.config.kv_cache_length, *x.shape[2:])], dim=1)

        return KeyValueCache(pad(keys), pad(projected.values))

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, arrange: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention of queries from `rotate_queries` over keys and values (B, K, h, D), the persistent ones
        first, where mask (B or 1, T, K) is True: (B, T, h * D), and the weights (B, h, T, K) as `arrange` returns them,
        or None where they are not recorded.
        """
        if self.keeps_plain_queries:  # persistent keys are compared with a query's second half, others with its first
            persistent, rest = keys.tensor_split([self.config.num_persistent_tokens], dim=1)
            size = self.head_dim
            keys = torch.cat([nn.functional.pad(persistent, (size, 0)), nn.functional.pad(rest, (0, size))], dim=1)
        name = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        arranges = attention is eager_attention_forward  # only it returns weights in the order of the attention map
        output, weights = attention(
            self,
            *(x.transpose(1, 2) for x in (queries, keys, values)),
            mask[:, None] if arranges else mask_for(name, mask[:, None], queries.dtype),
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            arrange=arrange,
        )
        return output.flatten(2), weights if arranges else None


class WindowAttention(TitansAttention):
    """Every token attends to the last W tokens, itself included, and to the persistent tokens.

    The cache holds the W - 1 keys before the next token without rotation, since their distance to it is not yet known.
    """

    def forward(
        self, hidden_states: Tensor, kv_cache: KeyValueCache, num_seen: Tensor, grid: TokenGrid, at_start: bool
    ) -> AttentionOutput:
        """Computes attention of hidden_states (B, T, hidden) on the slots of `grid`.

        num_seen: (B,) int64, tokens read before; `at_start` is True if it is 0 in every row. Returns weights
        (B, h, T, P + W).
        """
        num_persistent = self.config.num_persistent_tokens
        queries, new = self.project_queries(hidden_states), self.project_keys_and_values(hidden_states)
        # The cache may have been written in another dtype.
        kv_cache = kv_cache.map(lambda old, x: old.to(x.dtype), new)
        persistent = kv_cache.map(lambda x: x[:, :num_persistent])
        extended = kv_cache.map(lambda old, x: grid.prepend(old[:, num_persistent:], x), new)
        oldest = grid.row_starts - num_seen  # slot of the row's first token: those before it are empty
        output, weights = self._attend_blocks(queries, extended, persistent, None if at_start else oldest)
        last = extended.map(lambda x: grid.last_entries(x, self.config.sliding_window - 1))
        kv_cache = persistent.map(lambda x, y: torch.cat([x, y], dim=1), last)
        return AttentionOutput(self.o_proj(output), weights, kv_cache)

    def _attend_blocks(
        self, queries: Tensor, extended: KeyValueCache, persistent: KeyValueCache, oldest: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention in blocks of W queries, on the batch dimension; extended (B, W - 1 + T, h, D).

        The first block is computed apart, because only its window can reach back to slots before the first token.
        """
        window, length = self.config.sliding_window, queries.shape[1]
        num_previous, block = window - 1, min(window, length)
        begin = num_previous if oldest is None else 0
        first_block = extended.map(lambda x: x[:, begin : num_previous + block])
        first, first_weights = self._attend_block(queries[:, :block], first_block, persistent, oldest)
        if length == block:
            return first, first_weights
        num_blocks = -(-(length - block) // block)
        missing = num_blocks * block - (length - block)
        queries = nn.functional.pad(queries[:, block:], (0, 0, 0, 0, 0, missing)).unflatten(1, (num_blocks, block))

        def to_blocks(x: Tensor) -> Tensor:
            """Cuts (B, W - 1 + T, h, D) into blocks that overlap by W - 1: (B * blocks, W - 1 + block, h, D)."""
            padded = nn.functional.pad(x[:, block:], (0, 0, 0, 0, 0, missing))
            return padded.unfold(1, num_previous + block, block).permute(0, 1, 4, 2, 3).flatten(0, 1)

        persistent = persistent.map(lambda x: x.repeat_interleave(num_blocks, dim=0))
        output, weights = self._attend_block(queries.flatten(0, 1), extended.map(to_blocks), persistent, None)
        output = output.unflatten(0, (-1, num_blocks)).flatten(1, 2)[:, : length - block]
        if weights is not None:
            weights = weights.unflatten(0, (-1, num_blocks)).transpose(1, 2).flatten(2, 3)[:, :, : length - block]
            weights = torch.cat([first_weights, weights], dim=2)
        return torch.cat([first, output], dim=1), weights

    def _attend_block(
        self, queries: Tensor, block: KeyValueCache, persistent: KeyValueCache, oldest: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention of one block of queries (B, T, h, D) over keys (B, K, h, D) whose last T are its own."""
        window, (length, num_keys) = self.config.sliding_window, (queries.shape[1], block.keys.shape[1])
        device = queries.device
        positions = torch.arange(num_keys, device=device) - (num_keys - length)  # of keys, in slots of the block
        distance = positions[-length:, None] - positions
        mask = ((distance >= 0) & (distance < window))[None]
        if oldest is not None:
            mask = mask & (positions >= oldest[:, None])[:, None]
        mask = torch.cat([mask.new_ones(*mask.shape[:2], persistent.keys.shape[1]), mask], dim=-1)
        cos, sin = self.rotary_factors(positions + window, block.keys.dtype)  # positions from 1 to 2 W
        keys = torch.cat([persistent.keys, rotate(block.keys, cos, sin)], dim=1)
        values = torch.cat([persistent.values, block.values], dim=1)
        arrange = partial(self._by_distance, num_keys=num_keys)
        queries = self.rotate_queries(queries, cos[-length:], sin[-length:])
        return self.attend(queries, keys, values, mask, arrange)

    def _by_distance(self, weights: Tensor, num_keys: int) -> Tensor:
        """Arranges weights by key slot (B, h, T, P + K) as (B, h, T, P + W): persistent tokens, then the window, oldest
        first.
        """
        window, length = self.config.sliding_window, weights.shape[2]
        persistent, band = weights.split([weights.shape[-1] - num_keys, num_keys], dim=-1)
        band = nn.functional.pad(band, (window - 1 - (num_keys - length), 0))
        columns = torch.arange(length, device=band.device)[:, None] + torch.arange(window, device=band.device)
        return torch.cat([persistent, band.gather(-1, columns.expand(*band.shape[:2], -1, -1))], dim=-1)


class SegmentProjections(NamedTuple):
    """queries, keys and values (B, T, h, D) of a segment S, rotated (queries by `rotate_queries`); cos and sin (B or 1,
    T, 1, rotary_dim) for h.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor

    def split(self, length: int) -> list["SegmentProjections"]:
        """Splits several segments of `length` tokens."""
        # Not by indexing: the backward of an index is a tensor of the full size for every segment.
        # docs/dev/log.md: "MAC's training was quadratic in length, by indexing"
        return [SegmentProjections(*parts) for parts in zip(*(x.split(length, dim=1) for x in self), strict=True)]


class SegmentAttention(TitansAttention):
    """Causal attention within a segment over [P | h | S] (eq. 22-23): persistent tokens, what the memory recalls for
    each token of the segment (h), and the segment (S). Token i attends to h_j and S_j for j <= i, since h_j is computed
    from token j (paper section 4.1).

    The cache holds the rotated keys of h and of S for every slot of the segment.
    """

    def project(self, hidden_states: Tensor, slots: Tensor) -> SegmentProjections:
        """Projects and rotates hidden_states (B, T, hidden); each token is at `slots` (B or 1, T) of its segment."""
        # docs/dev/log.md: "MAC's rotary factors once a call instead of once a segment"
        queries, new = self.project_queries(hidden_states), self.project_keys_and_values(hidden_states)
        cos, sin = self.rotary_factors(torch.cat([slots, slots + self.config.segment_length]), queries.dtype)
        (cos, own_cos), (sin, own_sin) = cos.chunk(2), sin.chunk(2)
        queries, keys = self.rotate_queries(queries, own_cos, own_sin), rotate(new.keys, own_cos, own_sin)
        return SegmentProjections(queries, keys, new.values, cos, sin)

    def forward(
        self,
        projected: SegmentProjections,
        recalled: Tensor,
        kv_cache: KeyValueCache,
        slots: Tensor | None = None,
        filled: Tensor | None = None,
    ) -> AttentionOutput:
        """Computes attention of the projected tokens of a segment, with the recalled tokens h (B, T, hidden).

        slots: (B, T) int64, of the tokens in the segment; None for its first T. filled: (B, T) bool, True at slots with
        a token; None if all have one. Returns weights (B, h, T, P + 2 L).
        """
        length, num_persistent = self.config.segment_length, self.config.num_persistent_tokens
        num_keys = recalled.shape[1] if slots is None else length
        positions = torch.arange(num_keys, device=recalled.device)
        query_positions = positions[None] if slots is None else slots
        new = self.project_keys_and_values(recalled)
        recalled_keys = rotate(new.keys, projected.cos, projected.sin)
        kv_cache = KeyValueCache(
            self._store(kv_cache.keys, recalled_keys, projected.keys, slots, filled),
            self._store(kv_cache.values, new.values, projected.values, slots, filled),
        )
        mask = positions <= query_positions[..., None]
        mask = torch.cat([mask.new_ones(*mask.shape[:2], num_persistent), mask, mask], dim=-1)
        used = kv_cache if num_keys == length else kv_cache.map(partial(self._first_slots, number=num_keys))

        def by_slot(weights: Tensor) -> Tensor:
            """Pads the parts of h and of S to whole segments: (B, h, T, P + 2 K) -> (B, h, T, P + 2 L)."""
            parts = weights.split([num_persistent, num_keys, num_keys], dim=-1)
            return torch.cat([parts[0], *(nn.functional.pad(x, (0, length - num_keys)) for x in parts[1:])], dim=-1)

        output, weights = self.attend(projected.queries, used.keys, used.values, mask, by_slot)
        return AttentionOutput(self.o_proj(output), weights, kv_cache)

    def _split(self, cached: Tensor) -> "_CachedParts":
        """Splits (B, P + 2 L, h, D) into the parts of the persistent tokens, of h and of S."""
        length = self.config.segment_length
        return _CachedParts(*cached.split([self.config.num_persistent_tokens, length, length], dim=1))

    def _store(
        self, cached: Tensor, recalled: Tensor, own: Tensor, slots: Tensor | None, filled: Tensor | None
    ) -> Tensor:
        """Returns `cached` (B, P + 2 L, h, D) with the keys (or values) of h and of S, (B, T, h, D) each, at their
        slots.
        """
        cached = cached.to(own.dtype)  # the cache may have been written in another dtype
        if slots is not None:
            index = torch.cat([slots, slots + self.config.segment_length], dim=1) + self.config.num_persistent_tokens
            new = torch.cat([recalled, own], dim=1)
            return cached.scatter(1, index[..., None, None].expand_as(new), new)
        before = self._split(cached)
        parts = [before.persistent]
        for new, old in ((recalled, before.recalled), (own, before.own)):
            replaced, rest = old.tensor_split([new.shape[1]], dim=1)
            parts += [new if filled is None else torch.where(filled[..., None, None], new, replaced), rest]
        return torch.cat(parts, dim=1)

    def _first_slots(self, cached: Tensor, number: int) -> Tensor:
        """Omits all but the first slots of h and of S: (B, P + 2 L, h, D) -> (B, P + 2 number, h, D)."""
        parts = self._split(cached)
        return torch.cat([parts.persistent, parts.recalled[:, :number], parts.own[:, :number]], dim=1)


class _CachedParts(NamedTuple):
    """Keys or values of the persistent tokens (B, P, h, D), of h and of S (B, L, h, D)."""

    persistent: Tensor
    recalled: Tensor
    own: Tensor

"""The short-term memory: sliding-window attention (MAG, MAL) and segment attention (MAC), both with persistent tokens.

The cost is linear in the sequence length: queries are processed in blocks of one window (or segment), and no score or
mask larger than a block is formed. Persistent keys are outside of the window and carry no rotary position: with partial
rotation they are compared with the unrotated part of the query; with full rotation, with the query before rotation.
The file begins with eager attention, which records its weights, and the masks for other values of
`attn_implementation`.

Shapes: B batch, T query slots, K key slots, P persistent tokens, W window, L segment length, h heads, D head size.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache_layer import KeyValueCache, WindowCache
from .configuration_titans import TitansConfig
from .neural_memory import OutputProjection
from .token_grid import TokenGrid, rotary_factors


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, *, arrange, **kwargs):
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to the first rotary_dim entries of x (B, N, h, D); cos, sin (..., N, 1, rotary_dim)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = torch.addcmul(rotated * cos, torch.cat([second, first], dim=-1), sin)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def mask_for(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a mask, True where a query attends, to the form that an attention implementation is registered with: a
    boolean mask, or a mask that is added to the scores.

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
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = OutputProjection(query_size, config.hidden_size, bias=False)

    def project_queries(self, hidden_states: Tensor) -> Tensor:
        """Computes queries without rotation: (B, N, hidden) -> (B, N, h, D)."""
        return self._heads(self.q_proj(hidden_states))

    def project_keys_and_values(self, hidden_states: Tensor) -> KeyValueCache:
        """Computes keys without rotation and values: (B, N, hidden) -> (B, N, h, D) each."""
        return KeyValueCache(self._heads(self.k_proj(hidden_states)), self._heads(self.v_proj(hidden_states)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    @property
    def keeps_plain_queries(self) -> bool:
        """True if unrotated queries are needed too: with persistent tokens and heads that are rotated as a whole."""
        return self.config.num_persistent_tokens > 0 and self.config.rotary_dim == self.head_dim

    def rotate_both(self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Rotates queries and keys (B, T, h, D)."""
        return rotate(torch.cat([queries, keys], dim=2), cos, sin).split([queries.shape[2], keys.shape[2]], dim=2)

    def with_plain(self, rotated: Tensor, queries: Tensor) -> Tensor:
        """Returns rotated queries (B, T, h, D) for `attend`. If unrotated queries are needed too, they follow:
        (B, T, h, 2 D).
        """
        return torch.cat([rotated, queries], dim=-1) if self.keeps_plain_queries else rotated

    def persistent_keys_and_values(self, persistent: Tensor) -> KeyValueCache:
        """Returns keys and values of persistent tokens (B, P, hidden). `attend` compares these keys with unrotated
        entries of the queries.
        """
        projected = self.project_keys_and_values(persistent)
        keys = projected.keys
        if not self.keeps_plain_queries:
            rotary, rest = keys.split([self.config.rotary_dim, keys.shape[-1] - self.config.rotary_dim], dim=-1)
            keys = torch.cat([torch.zeros_like(rotary), rest], dim=-1)
        return KeyValueCache(keys, projected.values)

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, arrange: Callable[[Tensor], Tensor], **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention of queries from `with_plain` over keys and values (B, K, h, D), persistent tokens
        first, where mask (B or 1, T, K) is True; a mask of numbers is added to the scores. Returns (B, T, h * D), and
        the weights (B, h, T, K) as `arrange` returns them, None if they are not recorded. `kwargs` go to the attention
        function.
        """
        if queries.shape[-1] > self.head_dim:  # [rotated, plain]; the plain half is for persistent keys
            persistent, rest = keys.tensor_split([self.config.num_persistent_tokens], dim=1)
            size = self.head_dim
            keys = torch.cat([nn.functional.pad(persistent, (size, 0)), nn.functional.pad(rest, (0, size))], dim=1)
        name = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        arranges = attention is eager_attention_forward  # other weights are not in the order of the map
        if arranges:
            kwargs["arrange"] = arrange
        output, weights = attention(
            self,
            *(x.transpose(1, 2) for x in (queries, keys, values)),
            mask[:, None] if arranges or mask.is_floating_point() else mask_for(name, mask[:, None], queries.dtype),
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return output.flatten(2), weights if arranges else None


class WindowAttention(TitansAttention):
    """Every token attends to the last W tokens, itself included, and to the persistent tokens.

    Keys are rotated to their position in the document before they are cached. The cache has the keys of
    the last W - 1 columns, or of all columns if fewer were read. Where shapes may not depend on the number of columns
    (`grid.full_window`), it has W - 1 keys from the start.
    """

    def initial_kv_cache(self, persistent: Tensor) -> WindowCache:
        """Returns the cache before the first token: keys and values of the persistent tokens (B, P, hidden) alone."""
        projected = self.persistent_keys_and_values(persistent)
        return WindowCache(projected, projected.map(lambda x: x[:, :0]))

    def forward(
        self, hidden_states: Tensor, kv_cache: WindowCache, num_seen: Tensor, grid: TokenGrid, **kwargs
    ) -> tuple[Tensor, Tensor | None, WindowCache]:
        """Computes attention of hidden_states (B, T, hidden) on the slots of `grid`; num_seen: (B,) int64, tokens read
        before; `kwargs` go to the attention function. Returns hidden states (B, T, hidden), weights
        (B, h, T, P + W), None if they are not recorded, and the cache after the call.
        """
        queries, new = self.project_queries(hidden_states), self.project_keys_and_values(hidden_states)
        rotated, new.keys = self.rotate_both(queries, new.keys, *grid.rotary)
        # The cache may have been written in another dtype.
        kv_cache = kv_cache.map(lambda old: old.to(new.keys.dtype))
        if grid.is_single_token:
            output, weights, extended = self._attend_token(rotated, new, kv_cache, num_seen, grid, **kwargs)
        else:
            extended = kv_cache.window.map(grid.prepend, new)
            at_start = kv_cache.window.keys.shape[1] == 0
            oldest = None if at_start else grid.row_starts - num_seen  # slot of a row's first token
            queries = self.with_plain(rotated, queries)
            output, weights = self._attend_blocks(queries, extended, kv_cache.persistent, oldest, **kwargs)
        length = self.config.sliding_window - 1
        if not grid.full_window:
            length = min(length, kv_cache.window.keys.shape[1] + grid.num_columns)
        window = extended.map(lambda x: grid.last_entries(x, length))
        return self.o_proj(output), weights, WindowCache(kv_cache.persistent, window)

    def _attend_token(
        self, queries: Tensor, new: KeyValueCache, kv_cache: WindowCache, num_seen: Tensor, grid: TokenGrid, **kwargs
    ) -> tuple[Tensor, Tensor | None, KeyValueCache]:
        """Computes attention of one token of each row, whose query is rotated (B, 1, h, D). Returns the results of
        `attend`, and the keys and values of the window and of the token (B, N + 1, h, D).
        """
        persistent = kv_cache.persistent.keys
        if self.keeps_plain_queries:  # rotated like the query: the score is the same as without rotations
            persistent = rotate(persistent, *grid.rotary)
        keys = torch.cat([persistent, kv_cache.window.keys, new.keys], dim=1)
        values = torch.cat([kv_cache.persistent.values, kv_cache.window.values, new.values], dim=1)
        extended = KeyValueCache(keys, values).map(lambda x: x[:, persistent.shape[1] :])
        num_keys = extended.keys.shape[1]

        def mask() -> Tensor:
            positions = torch.arange(1 - num_keys, 1, device=keys.device)  # of the keys; the token itself is at 0
            is_read = (positions >= -num_seen[:, None])[:, None]
            is_read = nn.functional.pad(is_read, (persistent.shape[1], 0), value=True)
            if self.config._attn_implementation != "sdpa":
                return is_read
            return torch.zeros_like(is_read, dtype=keys.dtype).masked_fill(~is_read, -torch.inf)  # as sdpa makes it

        allowed, arrange = grid.once("mask", mask, keys.device), partial(self._by_distance, num_keys=num_keys)
        return *self.attend(queries, keys, values, allowed, arrange, **kwargs), extended

    def _attend_blocks(
        self, queries: Tensor, extended: KeyValueCache, persistent: KeyValueCache, oldest: Tensor | None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention of queries from `with_plain` (B, T, h, D) in blocks of W queries, which become rows of
        a batch. extended (B, N + T, h, D): keys and values of the N tokens before and of the T tokens.

        The first block is computed apart, because only its window can reach back to slots before the first token.
        """
        window, length = self.config.sliding_window, queries.shape[1]
        num_previous, block = extended.keys.shape[1] - length, min(window, length)
        first_block = extended.map(lambda x: x[:, : num_previous + block])
        first, first_weights = self._attend_block(queries[:, :block], first_block, persistent, oldest, **kwargs)
        if length == block:
            return first, first_weights
        num_blocks = -(-(length - block) // block)
        missing = num_blocks * block - (length - block)
        queries = nn.functional.pad(queries[:, block:], (0, 0, 0, 0, 0, missing)).unflatten(1, (num_blocks, block))

        def to_blocks(x: Tensor) -> Tensor:
            """Cuts (B, N + T, h, D) into blocks that overlap by W - 1: (B * blocks, W - 1 + block, h, D)."""
            padded = nn.functional.pad(x[:, num_previous + 1 :], (0, 0, 0, 0, 0, missing))  # 1 = block - (W - 1)
            return padded.unfold(1, window - 1 + block, block).permute(0, 1, 4, 2, 3).flatten(0, 1)

        persistent = persistent.map(lambda x: x.repeat_interleave(num_blocks, dim=0))
        output, weights = self._attend_block(queries.flatten(0, 1), extended.map(to_blocks), persistent, None, **kwargs)
        output = output.unflatten(0, (-1, num_blocks)).flatten(1, 2)[:, : length - block]
        if weights is not None:
            weights = weights.unflatten(0, (-1, num_blocks)).transpose(1, 2).flatten(2, 3)[:, :, : length - block]
            weights = torch.cat([first_weights, weights], dim=2)
        return torch.cat([first, output], dim=1), weights

    def _attend_block(
        self, queries: Tensor, block: KeyValueCache, persistent: KeyValueCache, oldest: Tensor | None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention of one block of queries (B, T, h, D or 2 D) over keys (B, K, h, D) whose last T are the
        keys of the block itself.
        """
        window, (length, num_keys) = self.config.sliding_window, (queries.shape[1], block.keys.shape[1])
        positions = torch.arange(num_keys, device=queries.device) - (num_keys - length)  # of the keys, in slots
        distance = positions[-length:, None] - positions
        mask = ((distance >= 0) & (distance < window))[None]
        if oldest is not None:
            mask = mask & (positions >= oldest[:, None])[:, None]
        mask = torch.cat([mask.new_ones(*mask.shape[:2], persistent.keys.shape[1]), mask], dim=-1)
        keys = torch.cat([persistent.keys, block.keys], dim=1)
        values = torch.cat([persistent.values, block.values], dim=1)
        return self.attend(queries, keys, values, mask, partial(self._by_distance, num_keys=num_keys), **kwargs)

    def _by_distance(self, weights: Tensor, num_keys: int) -> Tensor:
        """Arranges weights by key slot (B, h, T, P + K) as (B, h, T, P + W): persistent tokens, then the window, oldest
        first.
        """
        window, length = self.config.sliding_window, weights.shape[2]
        persistent, band = weights.split([weights.shape[-1] - num_keys, num_keys], dim=-1)
        band = nn.functional.pad(band, (window - 1 - (num_keys - length), 0))
        columns = torch.arange(length, device=band.device)[:, None] + torch.arange(window, device=band.device)
        return torch.cat([persistent, band.gather(-1, columns.expand(*band.shape[:2], -1, -1))], dim=-1)


class SegmentAttention(TitansAttention):
    """Causal attention within a segment over [P | h | S] (eq. 22-23): persistent tokens, the memory's recall for each
    token of the segment (h), and the segment (S). Token i attends to h_j and S_j for j <= i, since h_j is computed
    from token j (paper section 4.1).

    The cache holds the rotated keys of h and of S for every slot of the segment.
    """

    def initial_kv_cache(self, persistent: Tensor) -> KeyValueCache:
        """Returns the cache before the first token: keys and values of persistent tokens (B, P, hidden), then zeros."""

        def pad(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_zeros(x.shape[0], self.config.kv_cache_length, *x.shape[2:])], dim=1)

        return self.persistent_keys_and_values(persistent).map(pad)

    def project(self, hidden_states: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        """Projects and rotates hidden_states (B, T, hidden); each token is at `slots` (B or 1, T) of its segment.

        Returns queries (from `with_plain`), keys and values (B, T, h, D), and cos and sin (B or 1, T, 1,
        rotary_dim) for h.
        """
        # The factors for h and for S in one call, so that a decoded token is faster.
        queries, new = self.project_queries(hidden_states), self.project_keys_and_values(hidden_states)
        positions = torch.cat([slots, slots + self.config.segment_length])
        cos, sin = rotary_factors(self.config, positions, queries.dtype)
        (cos, own_cos), (sin, own_sin) = cos.chunk(2), sin.chunk(2)
        rotated, keys = self.rotate_both(queries, new.keys, own_cos, own_sin)
        return self.with_plain(rotated, queries), keys, new.values, cos, sin

    def forward(
        self,
        projected: Sequence[Tensor],
        recalled: Tensor,
        kv_cache: KeyValueCache,
        slots: Tensor | None = None,
        filled: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None, KeyValueCache]:
        """Computes attention of the tokens of a segment, as `project` returns them, with the recalled tokens h
        (B, T, hidden).

        slots: (B, T) int64, the tokens' slots in the segment; None for the first T slots. filled: (B, T) bool, True at
        slots with a token; None if every slot has one. `kwargs` go to the attention function. Returns hidden
        states (B, T, hidden), weights (B, h, T, P + 2 L), None if they are not recorded, and the cache after the call.
        """
        length, num_persistent = self.config.segment_length, self.config.num_persistent_tokens
        queries, keys, values, cos, sin = projected
        num_keys = recalled.shape[1] if slots is None else length
        positions = torch.arange(num_keys, device=recalled.device)
        query_positions = positions[None] if slots is None else slots
        new = self.project_keys_and_values(recalled)
        recalled_keys = rotate(new.keys, cos, sin)
        kv_cache = KeyValueCache(
            self._store(kv_cache.keys, recalled_keys, keys, slots, filled),
            self._store(kv_cache.values, new.values, values, slots, filled),
        )
        mask = positions <= query_positions[..., None]
        mask = torch.cat([mask.new_ones(*mask.shape[:2], num_persistent), mask, mask], dim=-1)
        used = kv_cache if num_keys == length else kv_cache.map(partial(self._first_slots, number=num_keys))

        def by_slot(weights: Tensor) -> Tensor:
            """Pads the parts of h and of S to whole segments: (B, h, T, P + 2 K) -> (B, h, T, P + 2 L)."""
            parts = weights.split([num_persistent, num_keys, num_keys], dim=-1)
            return torch.cat([parts[0], *(nn.functional.pad(x, (0, length - num_keys)) for x in parts[1:])], dim=-1)

        output, weights = self.attend(queries, used.keys, used.values, mask, by_slot, **kwargs)
        return self.o_proj(output), weights, kv_cache

    def _split(self, cached: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits (B, P + 2 L, h, D) into the parts of the persistent tokens, of h and of S."""
        length = self.config.segment_length
        return cached.split([self.config.num_persistent_tokens, length, length], dim=1)

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
        persistent, *before = self._split(cached)
        parts = [persistent]
        for new, old in zip((recalled, own), before, strict=True):
            replaced, rest = old.tensor_split([new.shape[1]], dim=1)
            parts += [new if filled is None else torch.where(filled[..., None, None], new, replaced), rest]
        return torch.cat(parts, dim=1)

    def _first_slots(self, cached: Tensor, number: int) -> Tensor:
        """Omits all but the first slots of h and of S: (B, P + 2 L, h, D) -> (B, P + 2 number, h, D)."""
        persistent, recalled, own = self._split(cached)
        return torch.cat([persistent, recalled[:, :number], own[:, :number]], dim=1)

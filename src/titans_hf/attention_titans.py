"""The short-term memory: sliding-window attention (MAG, MAL) and segment attention (MAC), both with persistent tokens.

Cost is linear in the sequence: queries are folded into blocks of one window (or segment), and no score or mask larger
than a block is ever made. Rotary positions are relative to the block, so none is larger than two windows at any context
length; persistent keys carry no position (their rotary part is zero) and stay outside the window.

Shapes: B batch, T query slots, K key slots, P persistent tokens, W window, L segment length, h heads, D head size.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_titans import TitansConfig
from .token_grid import TokenGrid


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, lay_out=None, **kwargs):
    """Attention written out, for `attn_implementation="eager"` and for attention weights; boolean mask. `lay_out`
    arranges the weights as they are returned.
    """
    key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    scores = query @ key.mT * scaling
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    shown = lay_out(weights)
    # What is returned is what multiplies the values, so that an output has a gradient with respect to it.
    weights = _undo(lay_out, shown, weights.shape)
    return (weights @ value).transpose(1, 2), shown


def _undo(lay_out: Callable[[Tensor], Tensor], shown: Tensor, shape: torch.Size) -> Tensor:
    """The x (B, h, T, K) of that shape with lay_out(x) = shown, zero where `lay_out` leaves it out."""
    size = shape[2] * shape[3]
    origin = lay_out(torch.arange(1, size + 1, device=shown.device).view(1, 1, *shape[2:]))  # 0: not from x
    flat = shown.new_zeros(*shape[:2], size + 1)
    return flat.scatter(2, origin.flatten(2).expand(*shape[:2], -1), shown.flatten(2))[..., 1:].view(shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first entries of x (B, N, h, D), as many as cos and sin (..., N, 1, rotary_dim) have."""
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
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        """(B, N, h * D) -> (B, N, h, D)"""
        return x.unflatten(-1, (-1, self.head_dim))

    def rotary_factors(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at `positions` (N,) or (B, N): (..., N, 1, rotary_dim), the same for all heads."""
        precise = torch.promote_types(dtype, torch.float32)
        size, theta = self.config.rotary_dim, self.config.rope_parameters["rope_theta"]
        exponents = torch.arange(0, size, 2, device=positions.device, dtype=precise) / size
        angles = positions[..., None].to(precise) * theta**-exponents
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def initial_keys_values(self, persistent: Tensor) -> tuple[Tensor, Tensor]:
        """What is carried from call to call: keys and values of the persistent tokens, then room for those to come."""

        def with_room(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_zeros(x.shape[0], self.config.attention_room, *x.shape[2:])], dim=1)

        keys, values = self.heads(self.k_proj(persistent)), self.heads(self.v_proj(persistent))
        placeless = torch.cat(
            [torch.zeros_like(keys[..., : self.config.rotary_dim]), keys[..., self.config.rotary_dim :]], -1
        )
        return with_room(placeless), with_room(values)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
        lay_out: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """queries (B, T, h, D), keys and values (B, K, h, D), visible (B or 1, T, K) -> (B, T, h * D) and, where they
        are recorded, the weights (B, h, T, K) as `lay_out` arranges them.
        """
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attention(
            self,
            *(x.transpose(1, 2) for x in (queries, keys, values)),
            visible[:, None],
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            lay_out=lay_out,
        )
        return output.flatten(2), weights


class WindowAttention(TitansAttention):
    """Every token attends to the last W tokens, itself included, and to the persistent tokens.

    Carries the W - 1 keys before the next token, not rotated: their distance to it is not known yet.
    """

    def forward(
        self, hidden_states: Tensor, carried: tuple[Tensor, Tensor], num_seen: Tensor, grid: TokenGrid, fresh: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
        """hidden_states (B, T, hidden) on the slots of `grid`; carried keys and values (B, P + W - 1, h, D); num_seen
        (B,) tokens read before (`fresh`: none, by any row) -> output, weights (B, h, T, P + W) where recorded, carried
        on.
        """
        num_persistent = self.config.num_persistent_tokens
        queries = self.heads(self.q_proj(hidden_states))
        new = (self.heads(self.k_proj(hidden_states)), self.heads(self.v_proj(hidden_states)))
        carried = tuple(old.to(x.dtype) for old, x in zip(carried, new, strict=True))  # of a call in another precision
        persistent = tuple(x[:, :num_persistent] for x in carried)
        extended = tuple(grid.extend(x[:, num_persistent:], y) for x, y in zip(carried, new, strict=True))
        oldest = grid.start - num_seen  # slot of the row's first token: what lies before it is empty
        output, weights = self._attend_blocks(queries, *extended, persistent, None if fresh else oldest)
        history = (grid.tail(x, self.config.sliding_window - 1) for x in extended)
        carried = tuple(torch.cat(pair, dim=1) for pair in zip(persistent, history, strict=True))
        return self.o_proj(output), weights, carried

    def _attend_blocks(self, queries, keys, values, persistent, oldest):
        """Folds blocks of W queries into the batch; keys and values (B, W - 1 + T, h, D). The first block is apart:
        only it can reach back to slots before the first token.
        """
        window, length = self.config.sliding_window, queries.shape[1]
        history, block = window - 1, min(window, length)
        begin = history if oldest is None else 0
        first = self._attend_block(
            queries[:, :block], *(x[:, begin : history + block] for x in (keys, values)), persistent, oldest
        )
        if length == block:
            return first
        num_blocks = -(-(length - block) // block)
        missing = num_blocks * block - (length - block)
        queries = nn.functional.pad(queries[:, block:], (0, 0, 0, 0, 0, missing)).unflatten(1, (num_blocks, block))
        keys, values = (
            nn.functional.pad(x[:, block:], (0, 0, 0, 0, 0, missing))
            .unfold(1, history + block, block)
            .permute(0, 1, 4, 2, 3)
            for x in (keys, values)
        )
        persistent = tuple(x.repeat_interleave(num_blocks, dim=0) for x in persistent)
        output, weights = self._attend_block(*(x.flatten(0, 1) for x in (queries, keys, values)), persistent, None)
        output = output.unflatten(0, (-1, num_blocks)).flatten(1, 2)[:, : length - block]
        if weights is not None:
            weights = weights.unflatten(0, (-1, num_blocks)).transpose(1, 2).flatten(2, 3)[:, :, : length - block]
            weights = torch.cat([first[1], weights], dim=2)
        return torch.cat([first[0], output], dim=1), weights

    def _attend_block(self, queries, keys, values, persistent, oldest):
        """One block of queries (B, T, h, D) on keys (B, K, h, D) that end with the block's own -> output, weights."""
        window, (length, num_keys) = self.config.sliding_window, (queries.shape[1], keys.shape[1])
        device = queries.device
        positions = torch.arange(num_keys, device=device) - (num_keys - length)  # of keys, in slots of the block
        distance = positions[-length:, None] - positions
        visible = ((distance >= 0) & (distance < window))[None]
        if oldest is not None:
            visible = visible & (positions >= oldest[:, None])[:, None]
        visible = torch.cat([visible.new_ones(*visible.shape[:2], persistent[0].shape[1]), visible], dim=-1)
        cos, sin = self.rotary_factors(positions + window, keys.dtype)  # positions from 1 to 2 W
        keys = torch.cat([persistent[0], rotate(keys, cos, sin)], dim=1)
        values = torch.cat([persistent[1], values], dim=1)
        by_distance = partial(self._by_distance, num_keys=num_keys)
        queries = rotate(queries, cos[-length:], sin[-length:])
        return self.attend(queries, keys, values, visible, by_distance)

    def _by_distance(self, weights: Tensor, num_keys: int) -> Tensor:
        """(B, h, T, P + K) by key slot -> (B, h, T, P + W): persistent tokens, then the window, oldest first."""
        window, length = self.config.sliding_window, weights.shape[2]
        persistent, band = weights.split([weights.shape[-1] - num_keys, num_keys], dim=-1)
        band = nn.functional.pad(band, (window - 1 - (num_keys - length), 0))
        columns = torch.arange(length, device=band.device)[:, None] + torch.arange(window, device=band.device)
        return torch.cat([persistent, band.gather(-1, columns.expand(*band.shape[:2], -1, -1))], dim=-1)


class SegmentAttention(TitansAttention):
    """Causal attention within a segment over [P | h | S]: persistent tokens, what the memory recalls for each token of
    the segment (h), and the segment (S). Token i sees h_j and S_j for j <= i: h_j is made from token j (paper section
    4.1).

    Carries the rotated keys of h and of S for every slot of the segment.
    """

    def project(self, hidden_states: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """hidden_states (B, T, hidden), each token `at` (B or 1, T) of its segment S -> queries, keys and values of S,
        (B, T, h, D), and the rotary factors of h, (B or 1, T, 1, rotary_dim).
        """
        queries, keys, values = (self.heads(f(hidden_states)) for f in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = self.rotary_factors(torch.cat([at, at + self.config.segment_length]), queries.dtype)
        (cos, cos_own), (sin, sin_own) = cos.chunk(2), sin.chunk(2)
        return rotate(queries, cos_own, sin_own), rotate(keys, cos_own, sin_own), values, cos, sin

    def forward(
        self,
        projected: tuple[Tensor, ...],
        recalled: Tensor,
        carried: tuple[Tensor, Tensor],
        slots: Tensor | None = None,
        filled: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
        """`projected` (`project`) of a segment and recalled h (B, T, hidden) at `slots` (B, T) of the segment, None for
        its first T; `filled` (B, T) marks the slots that hold a token, None if all do; carried (B, P + 2 L, h, D)
        -> output, weights (B, h, T, P + 2 L) where recorded, carried on.
        """
        length, num_persistent = self.config.segment_length, self.config.num_persistent_tokens
        queries, *own, cos, sin = projected
        num_keys = recalled.shape[1] if slots is None else length
        positions = torch.arange(num_keys, device=recalled.device)
        at = positions[None] if slots is None else slots
        keys = rotate(self.heads(self.k_proj(recalled)), cos, sin)
        new = zip((keys, self.heads(self.v_proj(recalled))), own, strict=True)
        carried = tuple(self._store(old, *pair, slots, filled) for old, pair in zip(carried, new, strict=True))
        visible = positions <= at[..., None]
        visible = torch.cat([visible.new_ones(*visible.shape[:2], num_persistent), visible, visible], dim=-1)
        keys, values = carried if num_keys == length else (self._first_slots(x, num_keys) for x in carried)

        def by_slot(weights: Tensor) -> Tensor:
            """(B, h, T, P + 2 K) -> (B, h, T, P + 2 L)"""
            parts = weights.split([num_persistent, num_keys, num_keys], dim=-1)
            return torch.cat([parts[0], *(nn.functional.pad(x, (0, length - num_keys)) for x in parts[1:])], dim=-1)

        output, weights = self.attend(queries, keys, values, visible, by_slot)
        return self.o_proj(output), weights, carried

    def _split(self, carried: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, P + 2 L, h, D) -> (B, P, h, D) of the persistent tokens and (B, L, h, D) of h and of S"""
        length = self.config.segment_length
        return carried.split([self.config.num_persistent_tokens, length, length], dim=1)

    def _store(
        self, carried: Tensor, recalled: Tensor, own: Tensor, slots: Tensor | None, filled: Tensor | None
    ) -> Tensor:
        """Puts what is of h and of S, (B, T, h, D) each, at its slots of `carried` (B, P + 2 L, h, D)."""
        carried = carried.to(own.dtype)  # of a call in another precision
        if slots is not None:
            index = torch.cat([slots, slots + self.config.segment_length], dim=1) + self.config.num_persistent_tokens
            new = torch.cat([recalled, own], dim=1)
            return carried.scatter(1, index[..., None, None].expand_as(new), new)
        persistent, *rooms = self._split(carried)
        parts = [persistent]
        for new, room in zip((recalled, own), rooms, strict=True):
            before, after = room.tensor_split([new.shape[1]], dim=1)
            parts += [new if filled is None else torch.where(filled[..., None, None], new, before), after]
        return torch.cat(parts, dim=1)

    def _first_slots(self, carried: Tensor, number: int) -> Tensor:
        """(B, P + 2 L, h, D) -> (B, P + 2 number, h, D)"""
        persistent, *rooms = self._split(carried)
        return torch.cat([persistent, *(room[:, :number] for room in rooms)], dim=1)

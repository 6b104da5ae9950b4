"""The list of surprising tokens: remembers a surprising token with the place that it followed, and mixes the tokens
that it finds into the model's distribution of the next token.

With y_t the input of the last layer's feed-forward network, x_t the tokens, p_t the model's distribution after x_t:

    k_t = W (y_t - c) / |W (y_t - c)|
    s_t = -log p_{t-1}(x_t), the surprise
    the entry i = (k_{t-1}, x_{t-8} ... x_{t-1}, x_t, s_t) is written if s_t >= threshold
    a_ti = softmax_i(beta k_t k_i + u e_ti),  m_t(v) = sum of a_ti over the entries i whose token is v
    l_t = sigmoid(w f_t + b)
    output logits = log((1 - l_t) p_t + l_t m_t) + log Z_t

The list holds the newest N entries of a row, with keys in 8 bits. e_ti are eight facts about an entry: log p_t of its
token; its surprise; whether its token has left the window; whether the last 1, 2, 3 and 4 tokens up to x_t are the
tokens before the entry's token; and d_ti, the share of the query's surprise that the entry knows. f_t are ten
features: s, the log of the sum of exp(scores); m, which is m_t of the best entry's token; h, the entropy of p_t in
nats; the log of the number of entries; n, the mean over a_t of how many tokens are the same; the products m s, m h and
m n; d, the mean over a_t of d_ti; and m d. Z_t is the sum of exp(logits) of the model, so that a list without entries
leaves the logits as they are.

d_ti distinguishes the entries of two persons of whom the same was said. Over the last 8 tokens x_j up to x_t with s_j
>= threshold,

    d_ti = sum of the s_j whose x_j is one of the 8 tokens before the entry's token / sum of all s_j,  0 without any

A kNN language model (Khandelwal et al. 2020) and a neural cache (Grave et al. 2017) of surprising tokens only.
Shapes: R rows, T tokens, N entries, K key size, D hidden size, V vocabulary, E entries that a block of queries may see.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize
from transformers import PreTrainedModel
from transformers.utils.generic import maybe_autocast

from ..cache_files import check_tensor
from .fast_weights import FLOATS, LARGEST, check_number

BLOCK = 64  # queries that are compared at once: this bounds the memory needed
KEY_UNITS = 127  # an entry's key is in multiples of 1 / 127: in 8 bits
CONTEXT = 4  # tokens before an entry's token that are compared in order
AROUND = 8  # tokens before an entry's token that are compared in any order
UNITS = (10, 1, 4, 5, 2)  # the features of the gate are divided by these, so that each is of the order of 1
NUM_FEATURES = 10


class ReadOut(NamedTuple):
    """The fitted numbers: log_sharpness (1,), log beta; entry_weight (8,), u; gate_weight (10,), w; gate_bias (1,)."""

    log_sharpness: Tensor
    entry_weight: Tensor
    gate_weight: Tensor
    gate_bias: Tensor

    @classmethod
    def cautious(cls) -> "ReadOut":
        """Returns the numbers before a fit: rounded results of a fit to novels, and a share below .007."""
        weight = torch.tensor([0.3, 0.3, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0])
        return cls(torch.tensor([math.log(9.0)]), weight, torch.zeros(NUM_FEATURES), torch.tensor([-5.0]))


class Found(NamedTuple):
    """The entries for Q queries: similarity (R, Q, E), k_t k_i; facts of e_ti, which expand to (R, Q, E): log p_t,
    surprise, whether the token has left the window, d_ti, and how many of the tokens before are the same; visible (R,
    Q, E) bool; tokens (R, 1, E) of the entries, -1 where there is none; entropy (R, Q) of p in nats.
    """

    similarity: Tensor
    facts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    visible: Tensor
    tokens: Tensor
    entropy: Tensor

    def at(self, queries: Tensor) -> "Found":
        """Selects queries (Q,) of the only row, and the entries that any of them sees; on the CPU."""
        shape, visible = self.similarity.shape, self.visible[:, queries]
        seen = visible[0].any(0)
        expanded = (x.expand(shape) for x in self.facts)
        similarity, visible, *facts = (
            x[:, queries][..., seen].cpu() for x in (self.similarity, self.visible, *expanded)
        )
        return Found(similarity, tuple(facts), visible, self.tokens[..., seen].cpu(), self.entropy[:, queries].cpu())

    def read(self, log_sharpness: Tensor, entry_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the features f of the gate (R, Q, 10) and the weights a of the entries (R, Q, E)."""
        dtype, any_visible = self.similarity.dtype, self.visible.any(-1, keepdim=True)
        scores = log_sharpness.exp() * self.similarity
        *facts, known, num_same = self.facts
        facts += [*(num_same >= number for number in range(1, CONTEXT + 1)), known]
        for weight, fact in zip(entry_weight, facts, strict=True):
            scores = scores + weight * fact.to(dtype)
        scores = scores.masked_fill(~self.visible & any_visible, -torch.inf)  # finite if none is visible
        weights = scores.softmax(-1)
        best = self.tokens.expand(scores.shape).gather(-1, scores.argmax(-1, keepdim=True))
        largest = torch.where(self.tokens == best, weights, 0).sum(-1)
        number = self.visible.sum(-1).clamp(min=1).to(dtype)
        mean_same = (weights * num_same).sum(-1)
        features = (scores.logsumexp(-1), largest, self.entropy, number.log(), mean_same)
        s, m, h, count, n = (x / unit for x, unit in zip(features, UNITS, strict=True))
        d = (weights * known).sum(-1)
        return torch.stack([s, m, h, count, n, m * s, m * h, m * n, d, m * d], dim=-1), weights


@dataclass
class TokenList:
    """A list of surprising tokens.

    center c (D,), projection W (D, K), read_out: set by a fit. entries N: how many are kept for a row. threshold: the
    least surprise of a written token, in nats. window: tokens of the model's window, None for all.
    """

    center: Tensor
    projection: Tensor
    read_out: ReadOut
    entries: int = 5400
    threshold: float = 3.0
    window: int | None = None

    @classmethod
    def random(cls, hidden_size: int, key_size: int = 64, seed: int = 0, **settings) -> "TokenList":
        """Returns a list with a random projection and a cautious read-out, which needs no fit."""
        generator = torch.Generator().manual_seed(seed)
        projection = torch.randn(hidden_size, min(key_size, hidden_size), generator=generator) / hidden_size**0.5
        return cls(torch.zeros(hidden_size), projection, ReadOut.cautious(), **settings)

    def check(self, model: PreTrainedModel) -> None:
        """Raises ValueError for a number that no fit makes, and for a list of another model."""
        size = model.config.get_text_config(decoder=True).hidden_size
        check_number("`token_list` entries", self.entries, 1, 2**24, (int,))
        check_number("`token_list` threshold", self.threshold, 0, LARGEST)
        check_tensor("list.center", self.center, (size,), FLOATS)
        check_tensor("list.projection", self.projection, (size, None), FLOATS)
        for (name, x), form in zip(self.read_out._asdict().items(), ReadOut.cautious(), strict=True):
            check_tensor(f"list.{name}", x, form.shape, FLOATS)

    def to(self, device: torch.device) -> None:
        """Moves the parameters."""
        if self.center.device != device:
            self.center, self.projection = self.center.to(device), self.projection.to(device)
            self.read_out = ReadOut(*(x.to(device) for x in self.read_out))

    def initial_state(self, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Returns the state before the first token.

        list.keys (R, N, K) int8; list.tokens, list.positions (R, N) int32, list.contexts (R, N, 8) int32, the latest
        token first, -1 where there is none; list.losses (R, N); list.recent (R, 8) int32, the last tokens, the latest
        first; list.surprises (R, 8), their s, 0 below the threshold; list.key (R, K), the last token's k; list.logits
        (R, V), the model's own after the last token.
        """
        number, size = self.entries, self.projection.shape[1]
        none = lambda *shape: torch.full((rows, *shape), -1, dtype=torch.int32, device=device)  # noqa: E731
        zeros = lambda *shape, of=dtype: torch.zeros((rows, *shape), dtype=of, device=device)  # noqa: E731
        return {
            "list.keys": zeros(number, size, of=torch.int8),
            "list.tokens": none(number),
            "list.positions": none(number),
            "list.contexts": none(number, AROUND),
            "list.losses": zeros(number, of=torch.float32),
            "list.recent": none(AROUND),
            "list.surprises": zeros(AROUND, of=torch.promote_types(dtype, torch.float32)),
            "list.key": zeros(size, of=torch.promote_types(dtype, torch.float32)),
            "list.logits": zeros(vocabulary),
        }

    def keys(self, mlp_inputs: Tensor) -> Tensor:
        """Computes k (R, T, K), in float32 at least, from y (R, T, D)."""
        dtype = torch.promote_types(mlp_inputs.dtype, torch.float32)
        centred = mlp_inputs.to(dtype) - self.center.to(dtype)
        with maybe_autocast(mlp_inputs.device.type, enabled=False):
            return normalize(centred @ self.projection.to(dtype), dim=-1)  # (R, T, D) @ (D, K)

    def read(self, *arguments) -> tuple[Tensor, dict[str, Tensor]]:
        """Mixes the kept logits of a call; returns them and the state after it, from the arguments of `find`."""
        found, after = self.find(*arguments)
        return torch.cat([self.mix(of_block, x) for of_block, x in found], dim=1), after

    def find(
        self,
        state: dict[str, Tensor],
        tokens: Tensor,
        mlp_inputs: Tensor,
        logits: Tensor,
        learns: Tensor,
        seen: Tensor,
        num_kept: int | None = None,
    ) -> tuple[Iterator[tuple[Tensor, Found]], dict[str, Tensor]]:
        """Returns blocks of the kept logits (R, Q, V) with the entries for their tokens, and the state after the call.

        Args:
            state: as `initial_state` returns it.
            tokens (R, T) int64: x; every one is a real token.
            mlp_inputs (R, T, D): y.
            logits (R, T, V): the model's.
            learns (R, T) bool: whether a token may be written.
            seen (R,) int64: how many tokens of each row were read before.
            num_kept: how many of the last logits are kept, None for all.
        """
        self.to(logits.device)
        seen, learns = seen.to(logits.device), learns.to(logits.device)
        keys, length = self.keys(mlp_inputs.to(logits.device)), tokens.shape[1]
        positions = seen[:, None] + torch.arange(length, device=logits.device)
        losses = surprise(torch.cat([state["list.logits"][:, None].to(logits.dtype), logits[:, :-1]], 1), tokens)
        is_surprising = (losses >= self.threshold) & (positions > 0)
        is_new = is_surprising & learns
        earlier = torch.cat([state["list.recent"].flip(1), tokens.to(torch.int32)], 1)  # (R, 8 + T)
        recent = earlier.unfold(1, AROUND, 1).flip(-1)  # (R, 1 + T, 8): before the call, and after each token
        surprises = torch.where(is_surprising, losses, 0).to(state["list.surprises"])
        surprises = torch.cat([state["list.surprises"].flip(1), surprises], 1).unfold(1, AROUND, 1).flip(-1)
        previous_keys = torch.cat([state["list.key"][:, None], keys[:, :-1]], 1)
        new = {
            "list.keys": (previous_keys * KEY_UNITS).round().to(torch.int8),
            "list.tokens": tokens.to(torch.int32),
            "list.positions": positions.to(torch.int32),
            "list.contexts": recent[:, :-1],
            "list.losses": losses,
        }
        counts, number = is_new.cumsum(1), self.entries
        slots = torch.where(is_new, number - 1 + counts, number + length)  # the last slot is dropped
        entries = {name: _append(state[name], x, slots) for name, x in new.items()}
        index = counts[:, -1:] + torch.arange(number, device=counts.device)
        after = {name: _rows_at(x, index) for name, x in entries.items()}
        after |= {"list.recent": recent[:, -1], "list.surprises": surprises[:, -1]}
        after |= {"list.key": keys[:, -1].detach(), "list.logits": logits[:, -1].detach()}
        begin = 0 if num_kept is None else length - num_kept
        queries = (keys, recent[:, 1:], surprises[:, 1:], positions, counts)
        *queries, logits = (x[:, begin:] for x in (*queries, logits))
        return self._compare_blocks(entries, queries, logits), after

    def _compare_blocks(
        self, entries: dict[str, Tensor], queries: list[Tensor], logits: Tensor
    ) -> Iterator[tuple[Tensor, Found]]:
        for begin in range(0, logits.shape[1], BLOCK):
            key, recent, surprises, position, count = (x[:, begin : begin + BLOCK] for x in queries)
            of_block, counts = logits[:, begin : begin + BLOCK], count[..., None]
            index = counts[:, 0] + torch.arange(self.entries + key.shape[1] - 1, device=counts.device)
            index = index.clamp(max=entries["list.tokens"].shape[1] - 1)
            here = {name: _rows_at(x, index) for name, x in entries.items()}
            places = counts[:, 0, None] + torch.arange(index.shape[1], device=counts.device)  # (R, 1, E)
            visible = (places >= counts) & (places < counts + self.entries) & (here["list.tokens"] >= 0)[:, None]
            yield of_block, self._compare(here, key, recent, surprises, position, of_block, visible)

    def _compare(
        self,
        entries: dict[str, Tensor],
        keys: Tensor,
        recent: Tensor,
        surprises: Tensor,
        position: Tensor,
        logits: Tensor,
        visible: Tensor,
    ) -> Found:
        with maybe_autocast(keys.device.type, enabled=False):
            similarity = keys / KEY_UNITS @ entries["list.keys"].to(keys.dtype).mT  # (R, Q, K) @ (R, K, E)
        log_p, tokens = logits.to(keys.dtype).log_softmax(-1), entries["list.tokens"][:, None]
        of_entries = log_p.gather(-1, tokens.clamp(min=0).long().expand_as(similarity))
        window = math.inf if self.window is None else self.window
        far = position[..., None] - entries["list.positions"][:, None] > window
        same = _number_same(recent, entries["list.contexts"])
        known = _known_surprise(entries["list.contexts"], recent, surprises.to(keys.dtype))
        facts = (of_entries, entries["list.losses"][:, None], far, known, same)
        return Found(similarity, facts, visible, tokens, -(log_p.exp() * log_p).sum(-1))

    def mix(self, logits: Tensor, found: Found) -> Tensor:
        """Computes log((1 - l) p + l m) + log Z (R, Q, V) from the model's logits."""
        dtype = found.similarity.dtype
        log_sharpness, entry_weight, gate_weight, gate_bias = (x.to(dtype) for x in self.read_out)
        features, weights = found.read(log_sharpness, entry_weight)
        # m of each entry's token, summed over a vocabulary: an entry has its token's whole share.
        tokens = found.tokens.clamp(min=0).long().expand_as(weights)
        shares = torch.zeros_like(logits, dtype=dtype).scatter_add(-1, tokens, weights)
        shares = shares.gather(-1, tokens).clamp(min=torch.finfo(dtype).tiny)
        gate = (features * gate_weight).sum(-1) + gate_bias
        gate = torch.where(found.visible.any(-1), gate, -torch.inf)[..., None]  # logit of l
        # log((1 - l) p + l m) = log p + log(1 - l) + log(1 + e^r),  r = log(l / (1 - l)) + log m - log p
        ratio = gate + shares.log() - found.facts[0]
        rise = torch.logaddexp(ratio, torch.zeros_like(ratio))
        # Entries with the same token add up to its rise; their parts add up to 1, so they need no gradient.
        parts = (weights / shares).detach()
        return (logits.to(dtype) + logsigmoid(-gate)).scatter_add(-1, tokens, parts * rise).to(logits.dtype)


@torch.no_grad()
def surprise(logits: Tensor, tokens: Tensor) -> Tensor:
    """Computes -log p (R, T), in float32 at least, of tokens (R, T) from the logits (R, T, V) before them."""
    losses = []
    for begin in range(0, tokens.shape[1], BLOCK):
        block = logits[:, begin : begin + BLOCK]
        block = block.to(torch.promote_types(block.dtype, torch.float32))
        chosen = block.gather(-1, tokens[:, begin : begin + BLOCK, None].to(block.device))[..., 0]
        losses.append(block.logsumexp(-1) - chosen)
    return torch.cat(losses, 1).clamp(min=0)


def _number_same(recent: Tensor, contexts: Tensor) -> Tensor:
    """Counts (R, Q, E) how many of the last 4 tokens, recent (R, Q, 8), are the tokens before an entry, contexts (R, E,
    8), up to the first that is not.
    """
    same, number = True, 0
    for lag in range(CONTEXT):
        token = recent[..., lag, None]
        same = (token == contexts[:, None, :, lag]) & (token >= 0) & same
        number = number + same.to(torch.int8)
    return number


def _known_surprise(contexts: Tensor, recent: Tensor, surprises: Tensor) -> Tensor:
    """Computes d (R, Q, E) from the tokens before the entries, contexts (R, E, 8), the last tokens of the queries,
    recent (R, Q, 8), and their s, surprises (R, Q, 8), 0 below the threshold.
    """
    tokens = torch.cat([recent[:, 0].flip(1), recent[:, 1:, 0]], 1)[..., None]  # (R, 7 + Q, 1)
    known = tokens == contexts[:, None, :, 0]
    for lag in range(1, AROUND):
        known = known | (tokens == contexts[:, None, :, lag])
    total = surprises.sum(-1, keepdim=True).clamp(min=torch.finfo(surprises.dtype).tiny)
    shares = (surprises / total).flip(-1)[:, :, None]  # (R, Q, 1, 8), the latest token last
    return (known.unfold(1, AROUND, 1) * shares).sum(-1)


def _append(old: Tensor, new: Tensor, slots: Tensor) -> Tensor:
    """Puts new (R, T, ...) at slots (R, T) behind old (R, N, ...): (R, N + T, ...). Slot N + T is dropped."""
    empty = -1 if old.dtype == torch.int32 else 0
    free = old.new_full((len(old), new.shape[1] + 1, *old.shape[2:]), empty)
    index = slots.view(*slots.shape, *[1] * (new.dim() - 2)).expand_as(new)
    return torch.cat([old, free], dim=1).scatter(1, index, new.to(old.dtype))[:, :-1]


def _rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Returns x (R, E, ...) at index (R, I)."""
    index = index.view(*index.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(*index.shape[:2], *x.shape[2:]))

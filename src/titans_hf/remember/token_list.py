"""The list of surprising tokens: remembers a surprising token with the place that it followed, and mixes the tokens
that it finds into the model's distribution of the next token.

With y_t the input of the last layer's feed-forward network, x_t the tokens, p_t the model's distribution after x_t:

    k_t = W (y_t - c) / |W (y_t - c)|
    s_t = -log p_{t-1}(x_t), the surprisal
    the entry i = (k_{t-1}, x_{t-2}, x_{t-1}, x_t, s_t) is written if s_t >= threshold
    a_ti = softmax_i(u e_ti),  m_t(v) = sum of a_ti over the entries i whose token is v
    l_t = sigmoid(w f_t + b)
    output logits = log((1 - l_t) p_t + l_t m_t) + log Z_t

The list holds the newest N entries of a row, with keys in 8 bits. e_ti are five facts about an entry: k_t k_i; log p_t
of its token; its surprisal; if the last token, and the last two up to x_t, are the tokens before the entry's token.
f_t are five features: the log of the sum of exp(u e_ti); m_t of the best entry's token; the entropy of p_t in nats; the
log of the number of entries; the mean over a_t of how many tokens are the same. Z_t is the sum of exp(logits) of the
model, so that a list without entries leaves the logits as they are.

A kNN language model (Khandelwal et al. 2020) and a neural cache (Grave et al. 2017) of surprising tokens only.
Shapes: R rows, T tokens, N entries, K key size, D hidden size, V vocabulary, Q queries, E entries beside them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize
from transformers import PreTrainedModel
from transformers.utils.generic import maybe_autocast

from ..cache_files import check_tensor
from .fast_weights import FLOATS, LARGEST, check_number

KEY_SIZE = 64  # K, of a model whose hidden size is not smaller
QUERIES = 64  # queries that are compared at once: this bounds the memory needed
KEY_UNITS = 127  # an entry's key is in multiples of 1 / 127: in 8 bits
CONTEXT = 2  # tokens before an entry's token that are compared
UNITS = (10, 1, 4, 5, 2)  # the features of the gate are divided by these, so that each is of the order of 1


class Found(NamedTuple):
    """What Q queries find: facts e (R, Q, 5, E); tokens of the entries (R, Q, E), -1 where a query sees none; entropy
    of p in nats (R, Q).
    """

    facts: Tensor
    tokens: Tensor
    entropy: Tensor

    def read(self, entry_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the features f of the gate (R, Q, 5) and the weights a of the entries (R, Q, E)."""
        visible = self.tokens >= 0
        scores = entry_weight @ self.facts  # (5,) @ (R, Q, 5, E)
        scores = scores.masked_fill(~visible & visible.any(-1, keepdim=True), -torch.inf)  # finite if none is visible
        weights = scores.softmax(-1)
        best = self.tokens.gather(-1, scores.argmax(-1, keepdim=True))
        largest = torch.where(self.tokens == best, weights, 0).sum(-1)
        number = visible.sum(-1).clamp(min=1).to(scores.dtype)
        same = (weights[..., None, :] * self.facts[..., -CONTEXT:, :]).sum((-2, -1))
        features = (scores.logsumexp(-1), largest, self.entropy, number.log(), same)
        return torch.stack([x / unit for x, unit in zip(features, UNITS, strict=True)], dim=-1), weights


class ReadOut(NamedTuple):
    """The fitted numbers: entry_weight (5,), u; gate_weight (5,), w; gate_bias (1,), b."""

    entry_weight: Tensor
    gate_weight: Tensor
    gate_bias: Tensor

    @classmethod
    def cautious(cls) -> "ReadOut":
        """Returns the numbers before a fit: rounded results of a fit to novels, and a share below .007."""
        weight = torch.tensor([9.0, 0.3, 0.3, 1.0, 1.0])
        return cls(weight, torch.zeros(len(UNITS)), torch.tensor([-5.0]))

    def gate(self, found: Found) -> tuple[Tensor, Tensor]:
        """Computes the logit of l (R, Q), -inf where no entry is visible, and the weights a (R, Q, E)."""
        entry_weight, gate_weight, gate_bias = (x.to(found.facts.dtype) for x in self)
        features, weights = found.read(entry_weight)
        return torch.where((found.tokens >= 0).any(-1), features @ gate_weight + gate_bias, -torch.inf), weights


@dataclass
class TokenList:
    """A list of surprising tokens.

    center c (D,), projection W (D, K), read_out: set by a fit. entries N: how many are kept for a row. threshold: the
    least surprisal of a written token, in nats.
    """

    center: Tensor
    projection: Tensor
    read_out: ReadOut
    entries: int = 5400
    threshold: float = 3.0

    @classmethod
    def random(cls, hidden_size: int, key_size: int = KEY_SIZE, **settings) -> "TokenList":
        """Returns a list with a random projection and a cautious read-out, which needs no fit."""
        generator = torch.Generator().manual_seed(0)
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

    def initial_state(self, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Returns the state before the first token, tensors (R, ...) by name; -1 stands where there is no token."""
        entries, size = self.entries, self.projection.shape[1]
        forms = {  # number, dtype and sizes after R
            "list.keys": (0, torch.int8, entries, size),
            "list.tokens": (-1, torch.int32, entries),
            "list.contexts": (-1, torch.int32, entries, CONTEXT),  # the latest token first
            "list.losses": (0, torch.float32, entries),
            "list.recent": (-1, torch.int32, CONTEXT),  # the last tokens, the latest first
            "list.key": (0, torch.promote_types(dtype, torch.float32), size),  # the last token's k
            "list.logits": (0, dtype, vocabulary),  # the model's own after the last token
        }
        return {x: torch.full((rows, *sizes), n, dtype=of, device=device) for x, (n, of, *sizes) in forms.items()}

    def keys(self, y: Tensor) -> Tensor:
        """Computes k (R, T, K), in float32 at least, from y (R, T, D)."""
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        return normalize((y - self.center.to(y)) @ self.projection.to(y), dim=-1)

    def read(
        self, state: dict, tokens: Tensor, y: Tensor, logits: Tensor, learns: Tensor, seen: Tensor, num_kept: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mixed logits (R, num_kept, V) of the last tokens of a call, and the state after it.

        tokens (R, T) int64: x, all real. y (R, T, D). logits (R, T, V): the model's. learns (R, T) bool: which may be
        written. seen (R,) int64: tokens of each row that were read before. Raises ValueError for a state from before
        tokens were added to the model.
        """
        device, length, kept = logits.device, tokens.shape[1], []
        before, now = state["list.logits"].shape[-1], logits.shape[-1]
        if before != now:
            raise ValueError(f"`cache` was made for {before} tokens, and the model has {now}: begin a new one.")
        self.center, self.projection = self.center.to(device), self.projection.to(device)
        self.read_out = ReadOut(*(x.to(device) for x in self.read_out))
        learns = learns & (seen[:, None] + torch.arange(length) > 0).to(learns.device)  # not a text's first token
        columns = (tokens.to(device), y.to(device), logits, learns.to(device))
        with maybe_autocast(device.type, enabled=False):
            for begin in range(0, length, QUERIES):
                of_block = [x[:, begin : begin + QUERIES] for x in columns]
                found, state = self.find(state, *of_block, is_read=begin + QUERIES > length - num_kept)
                if found is not None:
                    kept.append(self.mix(of_block[2], found))
        return torch.cat(kept, 1)[:, -num_kept:], state

    def find(
        self, state: dict, tokens: Tensor, y: Tensor, logits: Tensor, learns: Tensor, is_read: bool
    ) -> tuple[Found | None, dict[str, Tensor]]:
        """Returns what a block of tokens (R, Q) finds, None unless it is read, and the state after the block."""
        keys, number = self.keys(y), self.entries
        before = torch.cat([state["list.logits"][:, None].to(logits), logits[:, :-1]], 1)
        losses = surprisal(before, tokens)
        is_new = (losses >= self.threshold) & learns
        earlier = torch.cat([state["list.recent"].flip(1), tokens.to(torch.int32)], 1)
        recent = earlier.unfold(1, CONTEXT, 1).flip(-1)  # (R, 1 + Q, 2): before the block, and after each token
        new = {
            "list.keys": torch.cat([state["list.key"][:, None], keys[:, :-1]], 1).mul(KEY_UNITS).round(),
            "list.tokens": tokens,
            "list.contexts": recent[:, :-1],
            "list.losses": losses,
        }
        # Behind the N entries stand the tokens that are written, then the others, which no query sees.
        order, counts = (~is_new).int().argsort(dim=1, stable=True), is_new.cumsum(1)
        entries = {name: torch.cat([state[name], _rows_at(x, order).to(state[name])], 1) for name, x in new.items()}
        newest = counts[:, -1:] + torch.arange(number, device=counts.device)
        after = {name: _rows_at(x, newest) for name, x in entries.items()}
        after |= {"list.recent": recent[:, -1], "list.key": keys[:, -1].detach(), "list.logits": logits[:, -1].detach()}
        if not is_read:
            return None, after
        places, counts = torch.arange(number + tokens.shape[1], device=counts.device), counts[..., None]
        visible = (places >= counts) & (places < counts + number)  # (R, Q, E): the newest N of each query
        tokens_of = torch.where(visible, entries["list.tokens"][:, None], -1)
        log_p, now = logits.to(keys.dtype).log_softmax(-1), recent[:, 1:, None]
        same = (now == entries["list.contexts"][:, None]) & (now >= 0)  # (R, Q, E, 2)
        facts = (
            keys / KEY_UNITS @ entries["list.keys"].to(keys.dtype).mT,  # (R, Q, K) @ (R, K, E)
            log_p.gather(-1, tokens_of.clamp(min=0).long()),
            entries["list.losses"][:, None],
            *same.cumprod(-1).unbind(-1),
        )
        stacked = torch.stack([x.to(keys.dtype).expand(tokens_of.shape) for x in facts], 2)
        return Found(stacked, tokens_of, -(log_p.exp() * log_p).sum(-1)), after

    def mix(self, logits: Tensor, found: Found) -> Tensor:
        """Computes log((1 - l) p + l m) + log Z (R, Q, V) from the model's logits."""
        gate, weights = self.read_out.gate(found)
        gate, dtype = gate[..., None], weights.dtype
        # m of each entry's token, summed over a vocabulary: an entry has its token's whole share.
        tokens = found.tokens.clamp(min=0).long()
        shares = torch.zeros_like(logits, dtype=dtype).scatter_add(-1, tokens, weights)
        shares = shares.gather(-1, tokens).clamp(min=torch.finfo(dtype).tiny)
        # log((1 - l) p + l m) = log p + log(1 - l) + log(1 + e^r),  r = log(l / (1 - l)) + log m - log p
        ratio = gate + shares.log() - found.facts[..., 1, :]
        rise = torch.logaddexp(ratio, torch.zeros_like(ratio))
        # Entries with the same token add up to its rise; their parts add up to 1, so they need no gradient.
        parts = (weights / shares).detach()
        return (logits.to(dtype) + logsigmoid(-gate)).scatter_add(-1, tokens, parts * rise).to(logits.dtype)


@torch.no_grad()
def surprisal(logits: Tensor, tokens: Tensor) -> Tensor:
    """Computes -log p (R, T), in float32 at least, of tokens (R, T) from the logits (R, T, V) before them."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.gather(-1, tokens[..., None].to(logits.device))[..., 0]
    return (logits.logsumexp(-1) - chosen).clamp(min=0)


def _rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Returns x (R, E, ...) at index (R, I)."""
    return x.take_along_dim(index.view(*index.shape, *[1] * (x.dim() - 2)), 1)

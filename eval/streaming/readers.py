"""Ways in which a frozen model reads a text in pieces.

A reader forgets its text by `begin()`, reads the next piece by `read(ids)`, and counts the bytes of its state by
`state_bytes()`. Keys and values count two bytes a number, as they are kept in practice. Weights that learn count four.
"""

import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, nll_loss, normalize
from transformers import DynamicCache, PreTrainedModel

from titans_hf.remember import MemoryCache, remember

SINK_BLOCK = 1024  # tokens that share a sink: it is the window's length before the first of them
LAST_QUERIES = 32  # of a piece, whose attention SnapKV's score takes
GROUP = 32  # numbers of a key or a value that share a smallest number and a step, if they are kept in few bits
BLOCK, BLOCKS = 64, 4  # tokens of a retrieved block, and the number of blocks in the window
TOKEN_BYTES = 4  # of a token that is kept as a number


class Read(NamedTuple):
    """What a model says after each token of a piece."""

    log_p: Tensor  # (T, V)
    states: Tensor  # (T, D): the inputs of the last layer's MLP, keys of memories behind the last layer


class Reader:
    """Calls a model, and keeps the inputs of its last layer's MLP."""

    learns = False
    piece = 64  # tokens of a call

    def __init__(self, model: PreTrainedModel, window: int | None):
        self.model, self.window, self.found = model, window, []
        self.settings = {"dtype": str(model.dtype).removeprefix("torch.")}  # for the record
        module = getattr(model.base_model.layers[-1], "mlp", model.get_output_embeddings())
        module.register_forward_pre_hook(lambda _, args: self.found.append(args[0][0].detach().float()))
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.column_bytes = 2 * 2 * config.num_hidden_layers * heads * self.head_size  # keys and values of one token
        self.begin_token = config.bos_token_id or 0

    def prepare(self, texts: list[Tensor]) -> None:
        """Takes what it needs to know from texts that are not scored."""

    def call(self, ids: Tensor, last: int, **options) -> tuple[Read, object]:
        """Calls the model with ids (T,), and returns what it says after the last tokens, and its output."""
        self.found.clear()
        with torch.set_grad_enabled(self.learns):
            output = self.model(ids[None], logits_to_keep=last, **options)
            return Read(output.logits[0].float().log_softmax(-1), self.found[-1][-last:]), output


def quantise(x: Tensor, bits: int) -> Tensor:
    """Rounds x (..., D) to 2 ** bits steps of each GROUP numbers, whose smallest number and step are of 16 bits."""
    groups = x.float().unflatten(-1, (-1, min(GROUP, x.shape[-1])))
    low, high = (x.half().float() for x in groups.aminmax(dim=-1, keepdim=True))
    step = ((high - low) / (2**bits - 1)).half().float().clamp(min=1e-6)
    return (low + step * ((groups - low) / step).round().clamp(0, 2**bits - 1)).flatten(-2).to(x.dtype)


def score_columns(name: str, keys: Tensor, weights: Tensor | None) -> Tensor:
    """Scores cached columns: keys (heads, S, D), attention to them (query heads, T, S) -> (heads, S)."""
    if name == "random":
        return torch.rand(keys.shape[1]).expand(len(keys), -1)
    if name == "recent":
        return torch.arange(keys.shape[1]).expand(len(keys), -1)
    if name == "keydiff":  # Park et al. 2025: the keys farthest from the mean of all stay
        unit = normalize(keys, dim=-1)
        return -(unit * normalize(unit.mean(1, keepdim=True), dim=-1)).sum(-1)
    if name == "tova":  # Oren et al. 2024: the attention of the last query, the mean of a layer's heads
        return weights[:, -1].mean(0).expand(len(keys), -1)
    by_group = weights[:, -LAST_QUERIES:].mean(1).unflatten(0, (len(keys), -1)).mean(1)
    return avg_pool1d(by_group, 7, stride=1, padding=3)  # "snapkv", Li et al. 2024, for each piece


class Attention(Reader):
    """Full attention, or a window and a sink, and with a score the older columns that have the best score.

    Without a score a query sees the `window` last tokens however the text is cut into pieces. With a score, columns are
    evicted after each piece: until then its tokens see all that is held, at most `budget` bytes beyond the window. In
    fewer than 16 bits, columns are rounded as they leave the window. The sink is the model's begin token, computed at
    the distance of the window before the piece; with `near=False` it is the text's first token in its place
    (StreamingLLM). It is hidden until the text's first token has left the window, or the first column was evicted.
    """

    def __init__(self, model, window=None, *, budget: float = 0, score: str = "", bits: int = 16, near: bool = True):
        super().__init__(model, window)
        self.extra, self.score, self.bits, self.near = 0, score, bits, near
        self.wants_weights = score in ("tova", "snapkv")
        self.piece = min(window or 256, 256)
        if score:
            self.settings |= {"score": score, "bits": bits}
            self.piece = 1 + min(int(budget / self.column_bytes) // 8, 63)
            per_number = bits + 32 / min(GROUP, self.head_size) if bits < 16 else 16
            self.extra_bytes = self.column_bytes * per_number / 16
            self.extra = int((budget - (self.piece - 1) * self.column_bytes) / self.extra_bytes)
        model.set_attn_implementation("eager" if self.wants_weights else "sdpa")

    def begin(self) -> None:
        """Forgets the text."""
        self.cache, self.start, self.num_extra, self.sinks, self.sink_block = DynamicCache(), 0, 0, None, None
        torch.manual_seed(0)

    def state_bytes(self) -> int:
        """Returns the bytes of all keys and values."""
        held = self.start if self.window is None else min(self.start, self.window)
        if not self.score:
            return held * self.column_bytes
        return round((held + self.piece - 1) * self.column_bytes + self.num_extra * self.extra_bytes)

    def read(self, ids: Tensor) -> Read:
        """Reads the next piece (T,)."""
        positions, options = torch.arange(self.start, self.start + len(ids)), {}
        num_sinks = int(self.window is not None and self.start + len(ids) > self.window)
        if self.score:
            num_sinks = int(self.start > min(self.start, self.window - 1) + self.num_extra)
        if num_sinks:
            self.put_sink()
        if self.window is not None:
            options["attention_mask"] = self.mask(positions, num_sinks)
        read, output = self.call(
            ids, len(ids), cache=self.cache, use_cache=True, position_ids=positions[None],
            output_attentions=self.wants_weights, **options,
        )  # fmt: skip
        self.start += len(ids)
        if self.sinks is None and not self.near:
            self.sinks = [(x.keys[..., :1, :].detach(), x.values[..., :1, :].detach()) for x in self.cache.layers]
        if self.window is not None:
            self.evict(num_sinks, output.attentions)
        return read

    def put_sink(self) -> None:
        """Puts the sink's keys and values before all others."""
        block = self.start // SINK_BLOCK
        if self.near and block != self.sink_block:
            made, place = DynamicCache(), torch.tensor([[max(0, block * SINK_BLOCK - self.window)]])
            with torch.no_grad():
                self.model(torch.tensor([[self.begin_token]]), cache=made, position_ids=place)
            self.sinks, self.sink_block = [(x.keys, x.values) for x in made.layers], block
        for layer, (keys, values) in zip(self.cache.layers, self.sinks, strict=True):
            layer.keys, layer.values = torch.cat([keys, layer.keys], -2), torch.cat([values, layer.values], -2)

    def mask(self, positions: Tensor, num_sinks: int) -> Tensor:
        """Makes the mask that is added to scores, (1, 1, T, S): sink, extra columns, window, piece."""
        held = min(self.start, self.window - 1)
        distance = positions[:, None] - torch.arange(self.start - held, self.start + len(positions))
        sink = (positions >= (0 if self.score else self.window))[:, None].expand(-1, num_sinks)
        extra = torch.ones(len(positions), self.num_extra, dtype=torch.bool)
        recent = (distance >= 0) & (distance < self.window + (len(positions) if self.score else 0))
        visible = torch.cat([sink, extra, recent], 1)
        dtype = self.model.dtype
        return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None]

    def evict(self, num_sinks: int, weights: tuple[Tensor, ...] | None) -> None:
        """Keeps of the cached columns the window, and of those before it the `extra` best."""
        held = min(self.start, self.window - 1)
        for i, layer in enumerate(self.cache.layers):
            keys, values = (x[..., num_sinks:, :].detach().clone() for x in (layer.keys, layer.values))
            old, (heads, size) = keys.shape[-2] - held, keys.shape[1::2]
            best = torch.arange(0).expand(heads, -1)
            if self.bits < 16:
                for x in (keys, values):
                    x[..., self.num_extra : old, :] = quantise(x[..., self.num_extra : old, :], self.bits)
            if self.extra and old > 0:
                seen = weights[i][0, ..., num_sinks : num_sinks + old] if weights else None
                scores = score_columns(self.score, keys[0, :, :old], seen).float()
                if self.start == held + old > held + self.extra:  # the first token goes first: the sink comes
                    scores = scores.index_fill(1, torch.tensor([0]), -torch.inf)
                best = scores.topk(min(self.extra, old)).indices.sort().values
            best = best[None, ..., None].expand(-1, -1, -1, size)
            layer.keys, layer.values = (torch.cat([x.gather(2, best), x[..., old:, :]], 2) for x in (keys, values))
        self.num_extra = best.shape[2]


class Steps(Attention):
    """Dynamic evaluation: after each piece a step on its mean loss, of all weights; a text begins with the old weights.

    Either SGD, or the RMS form of Krause et al. (2018): the gradient is divided by the root of its mean square in texts
    that are not scored, and the weights decay to the start, those fastest whose gradients are large.
    """

    learns = True

    def __init__(self, model, window, *, rate: float, decay: float | None = None):
        super().__init__(model, window)
        self.rate, self.decay, self.rms, self.piece = rate, decay, None, Reader.piece
        self.settings |= {"rate": rate, "decay": decay}
        self.trained = [x.detach().clone() for x in model.parameters()]

    def begin(self) -> None:
        """Forgets the text, and puts the weights back."""
        super().begin()
        self.pending = None
        for x, trained in zip(self.model.parameters(), self.trained, strict=True):
            x.data.copy_(trained)

    def state_bytes(self) -> int:
        """Returns the bytes of the window and of all weights."""
        return super().state_bytes() + 4 * sum(x.numel() for x in self.trained)

    def prepare(self, texts: list[Tensor]) -> None:
        """Measures the mean squares of the gradients of 64 tokens each."""
        if self.decay is None:
            return
        squares, pieces = [torch.zeros_like(x) for x in self.trained], [p for text in texts for p in text.split(512)]
        for ids in pieces:
            log_p = self.call(ids, 65)[0].log_p[:-1]
            for total, g in zip(squares, self.gradients(log_p, ids[-64:]), strict=True):
                total += g.square() / len(pieces)
        self.rms = [x.sqrt() for x in squares]
        self.mean_rms = sum(x.sum() for x in self.rms) / sum(x.numel() for x in self.rms)

    def gradients(self, log_p: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """Computes the gradients of the mean loss."""
        return torch.autograd.grad(nll_loss(log_p, targets), list(self.model.parameters()))

    def read(self, ids: Tensor) -> Read:
        """Takes the step of the piece before, whose last target is the first of these tokens, and reads them."""
        if self.pending is not None:
            log_p, before = self.pending
            found = self.gradients(log_p, torch.cat([before[1:], ids[:1]]))
            for i, (x, g) in enumerate(zip(self.model.parameters(), found, strict=True)):
                if self.rms is None:
                    x.data -= self.rate * g
                else:
                    relative = (self.rms[i] / self.mean_rms).clamp(max=1 / self.decay)
                    x.data -= self.rate * g / (self.rms[i] + self.mean_rms)  # rare words have tiny roots
                    x.data += self.decay * relative * (self.trained[i] - x.data)
        read = super().read(ids)
        self.pending = read.log_p, ids
        return Read(read.log_p.detach(), read.states)


class Remember(Reader):
    """A model with `titans_hf.remember`: fast weights, a list of surprising tokens, or both."""

    piece = 512

    def __init__(self, model, window, *, memory: tuple[str, ...], learning: bool = True, **options):
        super().__init__(model, window)
        self.settings |= {name: Path(x).name for name, x in options.items()}
        remember(model, window, memory, **options).set_memory_learning(learning)
        if not learning:  # the whole start: its share could not be learned
            model.memory.fast_weights.step.start_rate = None

    def begin(self) -> None:
        """Forgets the text."""
        self.cache, self.start = MemoryCache(self.model), 0

    def state_bytes(self) -> int:
        """Returns the bytes of keys and values, of fast weights and of the list."""
        held = self.start if self.window is None else min(self.start, self.window + self.model.memory.extra_columns)
        return held * self.column_bytes + sum(x.numel() * x.element_size() for x in self.cache.state.values())

    def read(self, ids: Tensor) -> Read:
        """Reads the next piece (T,). The model may read its last chunk again first, and a sink of one token."""
        read, _ = self.call(ids, len(ids), cache=self.cache)
        self.start += len(ids)
        states = [x for x in self.found if len(x) > 1 or x is self.found[-1]]
        return Read(read.log_p, torch.cat(states)[-len(ids) :])


class Retrieval(Reader):
    """Reads each piece anew behind the blocks of the text that are most like its window by BM25.

    It sees the begin token, BLOCKS blocks that have left the window, and at most `window` tokens.
    """

    def begin(self) -> None:
        """Forgets the text."""
        self.ids = torch.zeros(0, dtype=torch.long)

    def state_bytes(self) -> int:
        """Returns the bytes of the window and of the text."""
        return self.window * self.column_bytes + len(self.ids) * TOKEN_BYTES

    def read(self, ids: Tensor) -> Read:
        """Reads the next piece (T,)."""
        recent = max(0, len(self.ids) + len(ids) - self.window)
        blocks = self.ids[: recent // BLOCK * BLOCK].split(BLOCK) if recent >= BLOCK else ()
        chosen = [blocks[i] for i in sorted(best_blocks(self.ids[recent:], blocks)[:BLOCKS])]
        sink = [torch.tensor([self.begin_token])] if recent else []
        read, _ = self.call(torch.cat([*sink, *chosen, self.ids[recent:], ids]), len(ids), use_cache=False)
        self.ids = torch.cat([self.ids, ids])
        return read


def best_blocks(query: Tensor, blocks: tuple[Tensor, ...]) -> list[int]:
    """Returns the numbers of the blocks in the order of their BM25 score (k = 1.2), the best first."""
    counts = [Counter(block.tolist()) for block in blocks]
    document_counts, words = Counter(word for x in counts for word in x), set(query.tolist())
    idf = {w: math.log(1 + (len(counts) - n + 0.5) / (n + 0.5)) for w, n in document_counts.items() if w in words}
    scores = [sum(idf[w] * 2.2 * x[w] / (x[w] + 1.2) for w in words & x.keys()) for x in counts]
    return sorted(range(len(blocks)), key=lambda i: -scores[i])

"""Fits the list of surprising tokens to texts, which are read with the model's fast weights.

1. Keys: the center c is the mean of y, the input of the last layer's feed-forward network, and the projection W its
   first principal directions, each divided by the fourth root of its variance.
2. The numbers of the read-out, the sharpness, the weights of an entry's facts and the gate, minimise the mean of
   -log((1 - l) p + l m) of the next token. The gate's weights, for features scaled to deviation 1, have a normal prior
   of deviation 1.

Shapes: R rows, T tokens of a text, D hidden size, K key size, C columns, E entries.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..cache import MemoryCache
from ..token_list import NUM_FEATURES, Found, ReadOut, TokenList, surprise

START = -3.0  # the gate's bias before the fit: a share of .05, which is near the best constant share
NUM_COLUMNS = 8000  # columns to which the read-out is fitted, spread over the texts
ROWS = 4  # texts that are read at once
MERGED = 128  # columns of a part of the evidence
DOCUMENT = "list.document"  # in the state: the number of each row's text in the call


@dataclass
class Recorder:
    """Replaces a model's list: calls `note` after each piece, and leaves the logits as they are.

    note(state, losses, mlp_inputs, seen) is called with the state, the losses (R, T) of the tokens that were read,
    their y (R, T, D), and the number of tokens (R,) that each row had read before.
    """

    window: int | None = None
    note: Callable[[dict, Tensor, Tensor, Tensor], None] | None = None

    def initial_state(self, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {
            "list.logits": torch.zeros(rows, vocabulary, dtype=dtype, device=device),
            DOCUMENT: torch.arange(rows, device=device),
        }

    def read(
        self, state: dict[str, Tensor], tokens: Tensor, mlp_inputs: Tensor, logits: Tensor, learns: Tensor, *others
    ) -> tuple[Tensor, dict[str, Tensor]]:
        seen = others[0]  # the number of kept logits, which follows, does not matter: all are noted
        if self.note is not None:
            before = torch.cat([state["list.logits"][:, None].to(logits), logits[:, :-1]], 1)
            self.note(state, surprise(before, tokens), mlp_inputs.detach(), seen)
        return logits, {"list.logits": logits[:, -1].detach()}


class Moments:
    """Sums of y, from which the keys are fitted. number (1,), total (D,), products (D, D), in float64 on the CPU."""

    def __init__(self, size: int):
        self.number = torch.zeros(1, dtype=torch.float64)
        self.total = torch.zeros(size, dtype=torch.float64)
        self.products = torch.zeros(size, size, dtype=torch.float64)

    def add(self, mlp_inputs: Tensor) -> None:
        """Counts y (R, T, D)."""
        y = mlp_inputs.flatten(0, 1).cpu().double()
        self.number, self.total, self.products = self.number + len(y), self.total + y.sum(0), self.products + y.T @ y

    def keys(self, size: int) -> tuple[Tensor, Tensor]:
        """Returns center (D,) and projection (D, K)."""
        mean = self.total / self.number
        variances, directions = torch.linalg.eigh(self.products / self.number - torch.outer(mean, mean))
        scale = variances[-size:].clamp(min=variances[-1] * 1e-6) ** -0.25
        return mean.float(), (directions[:, -size:] * scale).float()


class Evidence(NamedTuple):
    """Some columns of a text: columns (C,), their places; targets (1, C), the tokens after them; log_p (1, C), the
    model's log probabilities of the targets; found, the entries that the columns find.
    """

    columns: Tensor
    targets: Tensor
    log_p: Tensor
    found: Found

    def flat(self) -> list[Tensor]:
        """Returns the tensors in the order of `of`."""
        shape = self.found.similarity.shape
        *found, tokens = (x.expand(shape) for x in (*self.found.facts, self.found.visible, self.found.tokens))
        return [*self[:3], self.found.similarity, *found, tokens, self.found.entropy]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Evidence":
        columns, targets, log_p, similarity, *facts, visible, tokens, entropy = tensors
        return cls(columns, targets, log_p, Found(similarity, tuple(facts), visible, tokens, entropy))


def merge(parts: Sequence[Evidence]) -> list[Evidence]:
    """Joins a text's parts until each but the last has MERGED columns: few parts are fast to fit to."""
    merged: list[list[Evidence]] = []
    for x in parts:
        if not merged or sum(len(y.columns) for y in merged[-1]) >= MERGED:
            merged.append([])
        merged[-1].append(x)
    return [Evidence.of([_joined(x) for x in zip(*(y.flat() for y in group), strict=True)]) for group in merged]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Joins tensors (C,), (1, C) or (1, C, E), where missing entries get token -1, which no query sees."""
    if tensors[0].dim() < 3:
        return torch.cat(tuple(tensors), -1)
    number = max(x.shape[-1] for x in tensors)
    empty = -1 if tensors[0].dtype == torch.int32 else 0
    return torch.cat([pad(x, (0, number - x.shape[-1]), value=empty) for x in tensors], 1)


class Collector(TokenList):
    """A list that notes the entries found at chosen columns, and leaves the logits as they are.

    documents: ids (T,) of the texts of a call, one per row. wanted (T,) bool: the columns that are noted.
    """

    documents: Sequence[Tensor] = ()
    wanted: Sequence[Tensor] = ()
    evidence: list[list[Evidence]]

    def initial_state(self, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return super().initial_state(rows, vocabulary, dtype, device) | {DOCUMENT: torch.arange(rows, device=device)}

    def read(
        self, state: dict[str, Tensor], tokens: Tensor, mlp_inputs: Tensor, logits: Tensor, learns: Tensor, *others
    ) -> tuple[Tensor, dict[str, Tensor]]:
        seen = others[0]  # the number of kept logits, which follows, does not matter: all are noted
        blocks, after = self.find(state, tokens, mlp_inputs, logits, learns, seen)
        begin = 0
        for of_block, found in blocks if len(self.documents) else ():
            for row, document in enumerate(state[DOCUMENT].tolist()):
                self._note(document, int(seen[row]) + begin, of_block[row], _row(found, row))
            begin += of_block.shape[1]
        return logits, after

    def _note(self, document: int, begin: int, logits: Tensor, found: Found) -> None:
        chosen = self.wanted[document][begin : begin + len(logits)].nonzero()[:, 0]
        here = chosen.to(logits.device)
        found = found.at(here)
        if not len(chosen) or not found.visible.any():  # if no entry is visible, nothing depends on the list
            return
        targets = self.documents[document][begin + chosen + 1][None]
        log_p = logits[here].to(found.similarity.dtype).log_softmax(-1).cpu().gather(-1, targets.mT).mT
        self.evidence[document].append(Evidence(begin + chosen, targets, log_p, found))


def _row(found: Found, row: int) -> Found:
    """Returns the part of one row."""
    return Found(*(tuple(y[row, None] for y in x) if isinstance(x, tuple) else x[row, None] for x in found))


class Gains(NamedTuple):
    """For each text, at some columns: columns (C,) int64, and the losses (C,) in nats of the tokens after them, before
    and after.
    """

    columns: list[Tensor]
    before: list[Tensor]
    after: list[Tensor]


def read_texts(model: PreTrainedModel, texts: Sequence[Tensor]) -> None:
    """Reads texts (T,), one per row, each with an empty memory, in one call."""
    device, length = model.get_input_embeddings().weight.device, max(map(len, texts))
    ids = torch.stack([pad(x, (0, length - len(x))) for x in texts])
    mask = torch.stack([pad(torch.ones_like(x), (0, length - len(x))) for x in texts])
    with torch.no_grad():
        model(ids.to(device), attention_mask=mask.to(device), logits_to_keep=1, cache=MemoryCache(model))


def choose_columns(documents: Sequence[Tensor]) -> list[Tensor]:
    """Returns for each text (T,) bool, the columns to look at: every n-th that a token follows, about NUM_COLUMNS."""
    stride = max(1, math.ceil(sum(len(x) - 1 for x in documents) / NUM_COLUMNS))
    places = [torch.arange(len(x)) for x in documents]
    return [(x % stride == 0) & (x < len(x) - 1) for x in places]


def collect(model: PreTrainedModel, documents: Sequence[Tensor], saved: Any, bar: tqdm) -> list[list[Evidence]]:
    """Reads the documents with a memory whose list is a `Collector`; returns the evidence on the CPU."""
    collector, wanted = model.memory.token_list, choose_columns(documents)
    evidence: list[list[Evidence]] = [[] for _ in documents]
    order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
    for begin in range(0, len(order), ROWS):
        group, stage = order[begin : begin + ROWS], f"list-{begin}"
        if not (tensors := saved.load(stage)):
            collector.documents, collector.wanted = ([x[i] for i in group] for x in (documents, wanted))
            collector.evidence = [[] for _ in group]
            read_texts(model, collector.documents)
            for i, parts in enumerate(collector.evidence):
                for j, x in enumerate(merge(parts)):
                    tensors |= {f"{i}.{j}.{k}": tensor for k, tensor in enumerate(x.flat())}
            saved.save(stage, tensors)
        parts: dict[tuple[int, int], list[Tensor]] = {}
        for i, j, k in sorted(tuple(map(int, name.split("."))) for name in tensors):
            parts.setdefault((i, j), []).append(tensors[f"{i}.{j}.{k}"])
        for (i, _), x in parts.items():
            evidence[group[i]].append(Evidence.of(x))
        bar.update(sum(len(documents[i]) for i in group))
    return evidence


class _Numbers(NamedTuple):
    """The numbers that are fitted: log of the sharpness (1,), weights of an entry's facts (8,), and of the gate (11,),
    the last one its bias.
    """

    log_sharpness: Tensor
    entry_weight: Tensor
    gate: Tensor

    def losses(self, evidence: Evidence) -> Tensor:
        """Computes -log((1 - l) p + l m) (1, C)."""
        features, weights = evidence.found.read(self.log_sharpness, self.entry_weight)
        m = torch.where(evidence.found.tokens == evidence.targets[..., None], weights, 0).sum(-1)
        gate = features @ self.gate[:-1] + self.gate[-1]
        gate = torch.where(evidence.found.visible.any(-1), gate, -torch.inf)
        log_m = m.clamp(min=torch.finfo(m.dtype).tiny).log()
        return -torch.logaddexp(logsigmoid(-gate) + evidence.log_p, logsigmoid(gate) + log_m)


def fit_read_out(documents: Sequence[Sequence[Evidence]]) -> tuple[ReadOut, Gains]:
    """Returns the sharpness, entry weights and gate at which the mean of the losses is at a minimum, and the losses
    at the columns of the documents.

    Raises ValueError if no column finds an entry.
    """
    evidence = [x for parts in documents for x in parts]
    if not evidence:
        raise ValueError("`documents` must have surprising tokens with tokens after them, but the list wrote none.")
    number, dtype = sum(len(x.columns) for x in evidence), evidence[0].log_p.dtype
    cautious = [x.to(dtype) for x in ReadOut.cautious()]
    with torch.no_grad():
        features = torch.cat([x.found.read(*cautious[:2])[0][x.found.visible.any(-1)] for x in evidence])
    mean, deviation = features.mean(0), features.std(0, correction=0).clamp(min=0.05)
    # While it is fitted, the gate has features of mean 0 and deviation 1.
    values = [*cautious[:2], torch.zeros(NUM_FEATURES + 1, dtype=dtype)]
    values[2][-1] = START
    values = [x.requires_grad_() for x in values]

    def numbers() -> _Numbers:
        weight = values[2][:-1] / deviation
        return _Numbers(*values[:2], torch.cat([weight, values[2][-1:] - weight @ mean]))

    optimizer = torch.optim.LBFGS(values, max_iter=60, line_search_fn="strong_wolfe")

    @torch.enable_grad()
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = values[2][:-1].square().sum() / (2 * number)  # the prior
        loss.backward()
        for x in evidence:
            part = numbers().losses(x).sum() / number
            part.backward()
            loss = loss.detach() + part.detach()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        fitted, gains = numbers(), Gains([], [], [])
        for parts in documents:
            of_parts = [(x.columns, -x.log_p[0], fitted.losses(x)[0]) for x in parts]
            for values, x in zip(gains, zip(*of_parts, strict=True) if of_parts else [[], [], []], strict=True):
                values.append(torch.cat(tuple(x)) if len(x) else torch.zeros(0))
    numbers_of = (fitted.log_sharpness, fitted.entry_weight, fitted.gate[:-1], fitted.gate[-1:])
    return ReadOut(*(x.detach().clone() for x in numbers_of)), gains

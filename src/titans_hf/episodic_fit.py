"""Fits the episodic token memory of a model to texts: no weight of the model itself is trained.

1. Keys: the center c is the mean of y, the input of the last layer's feed-forward network, and the projection W its
   first principal directions, each divided by the fourth root of its variance.
2. The numbers of the read-out, the sharpness, the weights of an entry's facts and the gate, minimise the mean of
   -log((1 - l) p + l m) of the next token. The gate's weights, of features of deviation 1, have a normal prior of
   deviation 1.

A trained projection was worse than this one on novels that it was not trained on.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad
from tqdm.auto import tqdm

from .cache_titans import TitansCache
from .episodic_memory import EpisodicMemory, Found
from .memory_state import map_tensors
from .modeling_titans import TitansForCausalLM
from .token_grid import ALL_TOKENS, TokenGrid
from .token_layout import TokenLayout

PIECE = 512  # columns of a call
START = -3.0  # the gate's bias before the fit: a share of .05, which is near the best constant share
NUM_COLUMNS = 8000  # the read-out is fitted to so many columns, spread over the documents


class Piece(NamedTuple):
    """Some tokens of a document as a model has read them: tokens (1, T); mlp_inputs (1, T, hidden), y; hidden_states
    (1, T, hidden), the inputs of the LM head.
    """

    tokens: Tensor
    mlp_inputs: Tensor
    hidden_states: Tensor


class FitResult(NamedTuple):
    """For each document, at the columns that the fit has looked at: columns (C,) int64, and the losses (C,) in nats of
    the tokens after them, without the memory and with the fitted memory.
    """

    columns: list[Tensor]
    before: list[Tensor]
    after: list[Tensor]


class Evidence(NamedTuple):
    """Some columns of a document: columns (C,), their places; targets (1, C), the tokens after them; log_p (1, C), the
    model's log probabilities of the targets; weight (1, C) of the targets' losses; found, what the columns find.
    """

    columns: Tensor
    targets: Tensor
    log_p: Tensor
    weight: Tensor
    found: Found


@torch.no_grad()
def fit_episodic_memory(
    model: TitansForCausalLM,
    documents: Sequence[Tensor],
    weights: Sequence[Tensor] | None = None,
    *,
    key_tokens: int = 15_000,
    progress: bool = True,
) -> FitResult:
    """Fits the keys and the read-out of a model's episodic token memory, in place.

    Args:
        model: a model with `token_memory_entries`.
        documents: ids (T,) of texts, each read by itself. Some 80,000 tokens are enough; the gate learns to trust only
            what lies as far back as these texts are long.
        weights: for each document (T,), how much the loss of each of its tokens counts; 1 by default.
        key_tokens: how many tokens, from the starts of all documents, the keys are fitted to.
        progress: show bars on standard error.

    Raises ValueError for a model without the memory, for weights that do not fit, and for documents of
    less than two tokens.
    """
    _check(model, documents, weights)
    weights = [torch.ones(len(ids)) for ids in documents] if weights is None else weights
    memory, was_training = model.model.episodic_memory, model.training
    model.eval()
    bar = partial(tqdm, unit="token", disable=not progress)
    stride = choose_stride(weights)
    try:
        share = math.ceil(key_tokens / len(documents))
        with bar(desc="fitting keys", total=sum(min(share, len(x)) for x in documents)) as shown:
            fit_keys(memory, (piece for ids in documents for piece in read(model, ids[:share], shown)))
        evidence = []
        with bar(desc="fitting the read-out", total=sum(map(len, documents))) as shown:
            for ids, weight in zip(documents, weights, strict=True):
                evidence.append(collect(memory, model.lm_head, read(model, ids, shown), ids, weight, stride))
    finally:
        model.train(was_training)
    return fit_read_out(memory, evidence)


def _check(model, documents, weights) -> None:
    memory = getattr(getattr(model, "model", None), "episodic_memory", None)
    if memory is None:
        raise ValueError("`model` must have an episodic token memory: `token_memory_entries` of its config is 0.")
    if not len(documents) or any(x.dim() != 1 or len(x) < 2 for x in documents):
        raise ValueError("`documents` must be tensors (T,) of at least two ids.")
    if weights is not None and [len(x) for x in weights] != [len(x) for x in documents]:
        raise ValueError("`weights` must have one number for each id of `documents`.")


def choose_stride(weights: Sequence[Tensor]) -> int:
    """Returns n: of the columns with a weight of at most 1, the fit looks at every n-th, NUM_COLUMNS in all."""
    return math.ceil(sum(int(((weight[1:] > 0) & (weight[1:] <= 1)).sum()) for weight in weights) / NUM_COLUMNS)


def read(model: TitansForCausalLM, ids: Tensor, progress: tqdm) -> Iterator[Piece]:
    """Reads a document (T,) piece by piece."""
    cache = TitansCache(model.config)
    for tokens in ids.to(model.device)[None].split(PIECE, dim=1):
        outputs = model.model(tokens, cache=cache, use_cache=True, defer_episodic_memory=True)
        yield Piece(tokens, outputs.mlp_inputs, outputs.last_hidden_state)
        progress.update(tokens.shape[1])


@torch.no_grad()
def fit_keys(memory: EpisodicMemory, pieces: Iterable[Piece]) -> None:
    """Sets center and projection by the mean and the covariance of y."""
    size, number = memory.config.hidden_size, 0
    total = torch.zeros(size, dtype=torch.float64)
    products = torch.zeros(size, size, dtype=torch.float64)
    for piece in pieces:
        y = piece.mlp_inputs[0].cpu().double()
        number, total, products = number + len(y), total + y.sum(0), products + y.T @ y
    mean = total / number
    variances, directions = torch.linalg.eigh(products / number - torch.outer(mean, mean))
    kept = memory.config.token_memory_key_size
    scale = variances[-kept:].clamp(min=variances[-1] * 1e-6) ** -0.25
    memory.center.copy_(mean)
    memory.projection.copy_(directions[:, -kept:] * scale)


@torch.no_grad()
def collect(
    memory: EpisodicMemory,
    head: Callable[[Tensor], Tensor],
    pieces: Iterable[Piece],
    ids: Tensor,
    weight: Tensor,
    stride: int,
) -> list[Evidence]:
    """Updates an empty memory with the pieces of a document, ids (T,). Returns on the CPU what columns find in it: all
    columns whose next token has a weight above 1, and every `stride`-th column whose next token has a weight up to 1.
    """
    is_wanted = pad(weight[1:] > 1, (0, 1))
    is_wanted[((weight[1:] > 0) & ~is_wanted[:-1]).nonzero()[::stride, 0]] = True
    cache, parts, begin = TitansCache(memory.config), [], 0
    for piece in pieces:
        length = piece.tokens.shape[1]
        layout = TokenLayout(ALL_TOKENS, TokenGrid.identity(1, length, piece.tokens.device))
        wanted = is_wanted[begin : begin + length]
        columns, begin = begin + wanted.nonzero()[:, 0], begin + length
        for logits, found in memory.comparisons(*piece[1:], piece.tokens, head, length, layout, cache, wanted):
            here, columns = columns.split([logits.shape[1], len(columns) - logits.shape[1]])
            if found.visible.any():  # if no entry is visible, nothing depends on the memory
                targets = ids[here + 1][None]
                log_p = logits.cpu().to(found.similarity.dtype).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
                counts = weight[here + 1][None].to(log_p.dtype)
                counts = torch.where(counts > 1, counts, stride * counts)
                parts.append(Evidence(here, targets, log_p, counts, map_tensors(Tensor.cpu, found.seen())))
    return parts


class ReadOut(NamedTuple):
    """The numbers that are fitted: log of the sharpness (1,), weights of an entry's facts (7,), and of the gate (9,),
    the last one its bias.
    """

    log_sharpness: Tensor
    entry_weight: Tensor
    gate: Tensor

    @classmethod
    def of(cls, memory: EpisodicMemory, dtype: torch.dtype) -> "ReadOut":
        """Returns copies on the CPU."""
        gate = torch.cat([memory.gate_weight, memory.gate_bias])
        return cls(*(x.detach().to("cpu", dtype, copy=True) for x in (memory.log_sharpness, memory.entry_weight, gate)))

    def losses(self, evidence: Evidence) -> Tensor:
        """Computes -log((1 - l) p + l m) (1, C)."""
        features, weights = evidence.found.read(self.log_sharpness, self.entry_weight)
        m = torch.where(evidence.found.tokens == evidence.targets[..., None], weights, 0).sum(-1)
        gate = features @ self.gate[:-1] + self.gate[-1]
        gate = torch.where(evidence.found.visible.any(-1), gate, -torch.inf)
        log_m = m.clamp(min=torch.finfo(m.dtype).tiny).log()
        return -torch.logaddexp(logsigmoid(-gate) + evidence.log_p, logsigmoid(gate) + log_m)


def fit_read_out(memory: EpisodicMemory, documents: list[list[Evidence]]) -> FitResult:
    """Sets sharpness, entry weights and gate so that the weighted mean of the losses is at a minimum."""
    evidence = [x for parts in documents for x in parts]
    if not evidence:
        raise ValueError("`documents` must have surprising tokens: none of theirs was written.")
    total, number = sum(x.weight.sum() for x in evidence), sum(x.weight.numel() for x in evidence)
    read_out = ReadOut.of(memory, total.dtype)
    with torch.no_grad():
        features = [x.found.read(*read_out[:2])[0][x.found.visible.any(-1)] for x in evidence]
    features = torch.cat(features)
    mean, deviation = features.mean(0), features.std(0, correction=0).clamp(min=0.05)
    # While it is fitted, the gate has features of mean 0 and deviation 1.
    values = [*read_out[:2], torch.zeros_like(read_out.gate)]
    values[2][-1] = START
    values = [x.requires_grad_() for x in values]

    def as_read_out() -> ReadOut:
        weight = values[2][:-1] / deviation
        return ReadOut(*values[:2], torch.cat([weight, values[2][-1:] - weight @ mean]))

    optimizer = torch.optim.LBFGS(values, max_iter=60, line_search_fn="strong_wolfe")

    @torch.enable_grad()
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = values[2][:-1].square().sum() / (2 * number)  # the prior
        loss.backward()
        for x in evidence:
            part = (x.weight * as_read_out().losses(x)).sum() / total
            part.backward()
            loss = loss.detach() + part.detach()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        fitted = as_read_out()
        memory.log_sharpness.copy_(fitted.log_sharpness)
        memory.entry_weight.copy_(fitted.entry_weight)
        memory.gate_weight.copy_(fitted.gate[:-1])
        memory.gate_bias.copy_(fitted.gate[-1:])
    return evaluate(memory, documents)


@torch.no_grad()
def evaluate(memory: EpisodicMemory, documents: list[list[Evidence]]) -> FitResult:
    """Computes the losses at the columns of the documents, with the memory as it is."""
    result = FitResult([], [], [])
    for parts in documents:
        read_out = ReadOut.of(memory, parts[0].log_p.dtype) if parts else None
        columns, before = [x.columns for x in parts], [-x.log_p[0] for x in parts]
        after = [read_out.losses(x)[0] for x in parts]
        for values, of_parts in zip(result, (columns, before, after), strict=True):
            values.append(torch.cat(of_parts) if of_parts else torch.zeros(0))
    return result

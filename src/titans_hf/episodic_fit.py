"""Fits the episodic token memory of a model to texts: no weight of the model itself is trained.

1. Keys: the center c is the mean of y, the input of the last layer's feed-forward network, and the projection W its
   first principal directions, each divided by the fourth root of its variance.
2. Read gate: its weights minimise the mean of -log((1 - l) p + l m) of the next token, with l = sigmoid(w f + b).

A trained projection was worse than this one on novels that it was not trained on.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from tqdm.auto import tqdm

from .cache_titans import TitansCache
from .episodic_memory import EpisodicMemory
from .modeling_titans import TitansForCausalLM

PIECE = 512  # columns that are read at once
START = -3.0  # of the gate's bias: a share of .05, which is near the best constant one


class FitResult(NamedTuple):
    """For each document, the losses in nats of all its tokens but the first, (T - 1,): without the memory, and with the
    fitted memory.
    """

    before: list[Tensor]
    after: list[Tensor]


class _Evidence(NamedTuple):
    """Of T columns, in float64 on the CPU: features (T, 4) of the gate; has_entries (T,) bool; log p and log m (T,) of
    the next token; its weight (T,).
    """

    features: Tensor
    has_entries: Tensor
    log_p: Tensor
    log_m: Tensor
    weight: Tensor


@torch.no_grad()
def fit_episodic_memory(
    model: TitansForCausalLM,
    documents: Sequence[Tensor],
    weights: Sequence[Tensor] | None = None,
    *,
    key_tokens: int = 15_000,
    progress: bool = True,
) -> FitResult:
    """Fits the keys and the read gate of a model's episodic token memory, in place.

    Args:
        model: a model with `token_memory_entries`.
        documents: ids (T,) of texts, each read by itself. Some 80,000 tokens are enough; the gate learns to trust only
            what lies as far back as these texts are long.
        weights: for each document (T,), how much the loss of each of its tokens counts for the gate; 1 by default.
        key_tokens: how many tokens, from the starts of all documents, the keys are fitted to.
        progress: show bars on standard error.

    Raises ValueError for a model without the memory, for weights that do not fit, and for documents of
    less than two tokens.
    """
    _check(model, documents, weights)
    was_training = model.training
    model.eval()
    try:
        _fit_keys(model, documents, key_tokens, progress)
        evidence = _collect(model, documents, weights, progress)
        _fit_gate(model.model.episodic_memory, evidence)
    finally:
        model.train(was_training)
    return _result(model.model.episodic_memory, evidence, [len(x) for x in documents])


def _check(model, documents, weights) -> None:
    memory = getattr(getattr(model, "model", None), "episodic_memory", None)
    if memory is None:
        raise ValueError("`model` must have an episodic token memory: `token_memory_entries` of its config is 0.")
    if not len(documents) or any(x.dim() != 1 or len(x) < 2 for x in documents):
        raise ValueError("`documents` must be tensors (T,) of at least two ids.")
    if weights is not None and [len(x) for x in weights] != [len(x) for x in documents]:
        raise ValueError("`weights` must have one number for each id of `documents`.")


def _pieces(model, ids: Tensor, description: tqdm) -> Iterator[tuple[Tensor, object, TitansCache]]:
    """Reads a document (T,) piece by piece: yields ids (1, P), the base model's outputs, and the cache."""
    cache = TitansCache(model.config)
    for piece in ids.to(model.device)[None].split(PIECE, dim=1):
        yield piece, model.model(piece, past_key_values=cache, use_cache=True, defer_episodic_memory=True), cache
        description.update(piece.shape[1])


def _fit_keys(model, documents, key_tokens: int, progress: bool) -> None:
    """Sets center and projection by the mean and the covariance of y."""
    memory: EpisodicMemory = model.model.episodic_memory
    share = math.ceil(key_tokens / len(documents))
    starts = [x[:share] for x in documents]
    size, number = memory.config.hidden_size, sum(map(len, starts))
    total = torch.zeros(size, dtype=torch.float64)
    products = torch.zeros(size, size, dtype=torch.float64)
    with tqdm(total=number, desc="fitting keys", unit="token", disable=not progress) as bar:
        for ids in starts:
            for _, outputs, _ in _pieces(model, ids, bar):
                y = outputs.mlp_inputs[0].cpu().double()
                total += y.sum(0)
                products += y.T @ y
    mean = total / number
    variances, directions = torch.linalg.eigh(products / number - torch.outer(mean, mean))
    kept = memory.config.token_memory_key_size
    scale = variances[-kept:].clamp(min=variances[-1] * 1e-6) ** -0.25
    memory.center.copy_(mean)
    memory.projection.copy_(directions[:, -kept:] * scale)


def _collect(model, documents, weights, progress: bool) -> _Evidence:
    """Reads the documents and returns what the gate is fitted to."""
    parts = []
    with tqdm(total=sum(map(len, documents)), desc="fitting the gate", unit="token", disable=not progress) as bar:
        for i, ids in enumerate(documents):
            weight = torch.ones(len(ids)) if weights is None else weights[i]
            next_tokens, position = torch.cat([ids[1:], ids[:1]]).to(model.device), 0
            for piece, outputs, cache in _pieces(model, ids, bar):
                parts += _evidence_of(model, piece, outputs, cache, next_tokens, weight, position)
                position += piece.shape[1]
            parts[-1] = _Evidence(*(x[:-1] for x in parts[-1]))  # the last token has no next one
    return _Evidence(*map(torch.cat, zip(*parts, strict=True)))


def _evidence_of(model, piece, outputs, cache, next_tokens, weight, position: int) -> list[_Evidence]:
    """Updates the memory with a piece (1, P) of a document and returns the evidence of its blocks."""
    all_logits, length, parts = model.lm_head(outputs.last_hidden_state), piece.shape[1], []
    found = model.model.episodic_memory.comparisons(
        outputs.mlp_inputs, piece, lambda a, b: all_logits[:, a:b], length, outputs.layout, past_key_values=cache
    )
    for _, block in found:
        columns = torch.arange(position, position + block.features.shape[1])
        target = next_tokens[columns.to(next_tokens.device)][None, :, None]
        log_p = block.log_p.gather(-1, target)[0, :, 0]
        log_m = torch.where(block.tokens == target, block.weights, 0).sum(-1).log()[0]
        features, log_p, log_m = (x.cpu().double() for x in (block.features[0], log_p, log_m))
        weight_of_next = weight[(columns + 1) % len(weight)].double()
        parts.append(_Evidence(features, block.any_visible[0].cpu(), log_p, log_m, weight_of_next))
        position += len(columns)
    return parts


def _losses(gate: Tensor, evidence: _Evidence) -> Tensor:
    """Computes -log((1 - l) p + l m) (T,) for the logits of l (T,)."""
    return -torch.logaddexp(logsigmoid(-gate) + evidence.log_p, logsigmoid(gate) + evidence.log_m)


@torch.enable_grad()
def _fit_gate(memory: EpisodicMemory, evidence: _Evidence) -> None:
    """Minimises the weighted mean of the losses over weights and bias, of features of mean 0 and deviation 1. Columns
    without entries do not depend on the gate.
    """
    evidence = _Evidence(*(x[evidence.has_entries] for x in evidence))
    if not len(evidence.weight):
        raise ValueError("`documents` must have surprising tokens: none of theirs was written.")
    mean, deviation = evidence.features.mean(0), evidence.features.std(0) + 1e-6
    features = (evidence.features - mean) / deviation
    weight = evidence.weight / evidence.weight.sum()
    coefficients = torch.zeros(features.shape[1] + 1, dtype=torch.float64)
    coefficients[-1] = START
    coefficients.requires_grad_(True)
    optimizer = torch.optim.LBFGS([coefficients], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * _losses(features @ coefficients[:-1] + coefficients[-1], evidence)).sum()
        loss = loss + 1e-6 * coefficients[:-1].square().sum()  # features that never change have no weight
        loss.backward()
        return loss

    optimizer.step(closure)
    raw = coefficients.detach()[:-1] / deviation
    with torch.no_grad():
        memory.gate_weight.copy_(raw)
        memory.gate_bias.fill_(coefficients.detach()[-1] - (raw * mean).sum())


def _result(memory: EpisodicMemory, evidence: _Evidence, lengths: list[int]) -> FitResult:
    """Computes the losses of documents of `lengths` ids."""
    gate = evidence.features @ memory.gate_weight.cpu().double() + memory.gate_bias.cpu().double()
    after = torch.where(evidence.has_entries, _losses(gate, evidence), -evidence.log_p)
    sizes = [length - 1 for length in lengths]
    return FitResult(list((-evidence.log_p).split(sizes)), list(after.split(sizes)))

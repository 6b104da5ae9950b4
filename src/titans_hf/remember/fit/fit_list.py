"""Fits the list of surprising tokens to texts, which are read with the model's fast weights.

1. Keys: the center c is the mean of y, the input of the last layer's feed-forward network, and the projection W its
   first principal directions, each divided by the fourth root of its variance.
2. The numbers of the read-out minimise the mean of -log((1 - l) p + l m) of the next token. The gate's weights, for
   features scaled to deviation 1, have a normal prior of deviation 1.

Shapes: R rows, T tokens of a text, D hidden size, K key size, C columns, E entries.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..token_list import KEY_SIZE, QUERIES, Found, ReadOut, TokenList

START = -3.0  # the gate's bias before the fit: a share of .05, which is near the best constant share


def fit_keys(mean: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """Returns center (D,) and projection (D, K), from the means of y (D,) and of its products (D, D) in float64."""
    variances, directions = torch.linalg.eigh(products - torch.outer(mean, mean))
    scale = variances[-KEY_SIZE:].clamp(min=variances[-1] * 1e-6) ** -0.25
    return mean.float(), (directions[:, -KEY_SIZE:] * scale).float()


class Evidence(NamedTuple):
    """Some columns of a text: columns (C,), their places; targets (1, C), the tokens after them; log_p (1, C), the
    model's log probabilities of the targets; what the columns find.
    """

    columns: Tensor
    targets: Tensor
    log_p: Tensor
    found: Found

    def losses(self, read_out: ReadOut) -> Tensor:
        """Computes -log((1 - l) p + l m) (1, C)."""
        gate, weights = read_out.gate(self.found)
        m = torch.where(self.found.tokens == self.targets[..., None], weights, 0).sum(-1)
        log_m = m.clamp(min=torch.finfo(m.dtype).tiny).log()
        return -torch.logaddexp(logsigmoid(-gate) + self.log_p, logsigmoid(gate) + log_m)


class Collector(TokenList):
    """A list that notes what every `stride`-th block of its texts finds, and leaves the logits as they are.

    texts: ids (T,) of the texts of a call, one per row, all from their first token on. noted: the tensors of `Evidence`
    and of its `found`, by "text.first column.place".
    """

    texts: Sequence[Tensor] = ()
    stride: int = 1
    noted: dict[str, Tensor]

    def read(self, state: dict, tokens: Tensor, y: Tensor, logits: Tensor, learns: Tensor, seen: Tensor, num_kept: int):
        self.begin = int(seen[0])
        return super().read(state, tokens, y, logits, learns, seen, tokens.shape[1])  # all, whatever is kept

    def mix(self, logits: Tensor, found: Found) -> Tensor:
        begin, self.begin = self.begin, self.begin + logits.shape[1]
        longer = [i for i, x in enumerate(self.texts) if len(x) > begin]  # the rows of this piece
        for row, text in enumerate(longer):
            targets = self.texts[text][None, begin + 1 : begin + 1 + logits.shape[1]]
            facts, tokens, entropy = (x[row : row + 1, : targets.shape[1]].cpu() for x in found)
            used = (tokens >= 0).any(1)[0]
            if (begin // QUERIES + text) % self.stride == 0 and bool(used.any()):
                log_p = logits[row, : targets.shape[1]].to(facts.dtype).log_softmax(-1).cpu().gather(-1, targets.mT).mT
                columns = torch.arange(begin, begin + targets.shape[1])
                parts = (columns, targets, log_p, facts[..., used], tokens[..., used], entropy)
                self.noted |= {f"{text}.{begin:08}.{place}": x for place, x in enumerate(parts)}
        return logits

    def evidence(self) -> Iterator[tuple[int, Evidence]]:
        """Yields what was noted, with the text's number in the call, in the order of texts and columns."""
        for block in sorted({name.rpartition(".")[0] for name in self.noted}):
            columns, targets, log_p, *found = (self.noted[f"{block}.{place}"] for place in range(6))
            yield int(block.partition(".")[0]), Evidence(columns, targets, log_p, Found(*found))


def fit_read_out(evidence: Sequence[Evidence]) -> ReadOut:
    """Returns the read-out at which the mean of the losses is at a minimum. Raises ValueError if no column finds an
    entry.
    """
    if not evidence:
        raise ValueError("`documents` must have surprising tokens with tokens after them, but the list wrote none.")
    number, dtype = sum(len(x.columns) for x in evidence), evidence[0].log_p.dtype
    entry_weight, gate_weight, _ = (x.to(dtype) for x in ReadOut.cautious())
    with torch.no_grad():
        features = torch.cat([x.found.read(entry_weight)[0][(x.found.tokens >= 0).any(-1)] for x in evidence])
    mean, deviation = features.mean(0), features.std(0, correction=0).clamp(min=0.05)
    # While it is fitted, the gate has features of mean 0 and deviation 1.
    values = [x.requires_grad_() for x in (entry_weight, gate_weight, torch.tensor([START], dtype=dtype))]

    def read_out() -> ReadOut:
        weight = values[1] / deviation
        return ReadOut(values[0], weight, values[2] - (weight * mean).sum())

    optimizer = torch.optim.LBFGS(values, max_iter=60, line_search_fn="strong_wolfe")

    @torch.enable_grad()
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = values[1].square().sum() / (2 * number)  # the prior
        loss.backward()
        for x in evidence:
            part = x.losses(read_out()).sum() / number
            part.backward()
            loss = loss.detach() + part.detach()
        return loss

    optimizer.step(closure)
    return ReadOut(*(x.detach() for x in read_out()))

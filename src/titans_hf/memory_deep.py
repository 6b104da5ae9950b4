"""The deep rule of the memory on a page: any network and any inner loss, by autograd (the paper's literal form).

    u_t = grad l(M; k_t, v_t) at the weights of the start of t's chunk       (eq. 12, 16)
    S_t = eta_t S_{t-1} - theta_t u_t                                        (eq. 10, 14)
    M_t = (1 - alpha_t) (M_{t-1} - M_0) + M_0 + S_t                          (eq. 13; M_0 = 0 as the paper states it)
    o_t = M_t(q_t)                                                           (eq. 15)

A network is a function `network(x, layers)` of vectors x (..., T, d_in) and of its linear maps, one for each matrix of
weights, each of which it calls once: `lambda x, layers: x + layers[1](gelu(layers[0](x)))`. The gradient of one token
with respect to a matrix is then a product of two vectors, h_t (x) delta_t: the input of the linear map, and the
gradient of the loss with respect to the map's output, which autograd computes. No weights of a single token are formed:

    x M_t = beta_t x (M - M_0) + f_t x S + x M_0 - sum_{i<=t} G_ti (x . h_i) delta_i

with the factors of `memory_rule.piece`. An inner loss is a function `loss(prediction, value)` of vectors (..., T, D),
which returns one number a token, (..., T).

Shapes: B rows, H heads, T tokens, C tokens of a chunk, L matrices of the network.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import layer_norm
from torch.utils.checkpoint import checkpoint

from .memory_rule import ACTIVATIONS, unroll

Layers = Sequence[Callable[[Tensor], Tensor]]
Network = Callable[[Tensor, Layers], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

NORM_EPSILON = 1e-5  # of the residual network's norm: PyTorch's default, because the paper gives none


@cache
def make_network(name: str, activation: str) -> Network:
    """Returns a network by its names in `TitansConfig`: "mlp", W_L act(... act(W_1 x)); "residual", x + LN(mlp(x))."""
    act = ACTIVATIONS[activation]

    def mlp(x: Tensor, layers: Layers) -> Tensor:
        for layer in layers[:-1]:
            x = act(layer(x))
        return layers[-1](x)

    def residual(x: Tensor, layers: Layers) -> Tensor:
        h = mlp(x, layers)
        return x + layer_norm(h, h.shape[-1:], eps=NORM_EPSILON)

    return {"mlp": mlp, "residual": residual}[name]


def l2(prediction: Tensor, value: Tensor) -> Tensor:
    """Computes |M(k) - v|^2 (eq. 12): (..., T, D) -> (..., T)."""
    return (prediction - value).square().sum(-1)


def huber(prediction: Tensor, value: Tensor) -> Tensor:
    """Computes `l2` for errors up to |v|, and continues it linearly above: (..., T, D) -> (..., T)."""
    squared, limit = l2(prediction, value), value.norm(dim=-1)
    outside = squared > limit.square()
    error = torch.where(outside, squared, 1.0).sqrt()
    return torch.where(outside, 2 * limit * error - limit.square(), squared)


LOSSES: dict[str, Loss] = {"l2": l2, "huber": huber}


def read(network: Network, weights: Sequence[Tensor], queries: Tensor) -> Tensor:
    """Computes M(q) (eq. 15): weights (..., d_in, d_out), queries (..., T, D) -> (..., T, D)."""
    return network(queries, [partial(torch.matmul, other=w) for w in weights])


def gradient_factors(
    network: Network, loss: Loss, weights: Sequence[Tensor], k: Tensor, v: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Computes the gradient of each token's loss with respect to each matrix as a product of two vectors.

    weights: (B, H, d_in, d_out) for each layer. k, v: (B, H, T, D). Returns h (B, H, T, d_in) and delta
    (B, H, T, d_out), a list of L tensors each. Raises ValueError for a network that does not call each layer once.
    """

    def total(probes: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        inputs: dict[int, Tensor] = {}

        def layer(i: int) -> Callable[[Tensor], Tensor]:
            def linear(x: Tensor) -> Tensor:
                if i in inputs:
                    raise ValueError(f"`network` must call each of its layers once, but calls layer {i} again.")
                inputs[i] = x
                return x @ weights[i] + probes[i]  # the gradient of a probe, which is 0, is delta

            return linear

        losses = loss(network(k, [layer(i) for i in range(len(weights))]), v)
        if len(inputs) < len(weights):
            raise ValueError(f"`network` must call each of its {len(weights)} layers once, but calls {len(inputs)}.")
        return losses.sum(), [inputs[i] for i in range(len(weights))]

    probes = [k.new_zeros(*k.shape[:-1], w.shape[-1]) for w in weights]
    differentiates = torch.is_grad_enabled()  # in training, the gradients are differentiated again
    if torch.compiler.is_compiling() or (differentiates and not _saves_by_hooks()):
        deltas, inputs = torch.func.grad(total, has_aux=True)(probes)
        return inputs, deltas
    # Autograd itself is faster without a graph of the tokens before; with one, it would walk through all of it.
    with torch.inference_mode(False), torch.enable_grad():
        if k.is_inference():  # autograd saves no tensor that was made in inference mode
            weights, k, v, probes = [w.clone() for w in weights], k.clone(), v.clone(), [p.clone() for p in probes]
        loss_of_tokens, inputs = total([probe.requires_grad_() for probe in probes])
        deltas = torch.autograd.grad(loss_of_tokens, probes, create_graph=differentiates)
    return [x if differentiates else x.detach() for x in inputs], list(deltas)


def _saves_by_hooks() -> bool:
    """True where hooks save the tensors of a graph, as in gradient checkpointing: torch.func does not work there."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("asked"):
            return False
    except RuntimeError:
        return True


def clip(inputs: list[Tensor], deltas: list[Tensor], v: Tensor) -> list[Tensor]:
    """Clips the gradient of each layer at 4 |v|, twice the largest of a linear memory with a unit key: the weights then
    grow at most linearly with the number of tokens, whatever the tokens are.
    """
    limit, clipped = 4 * v.norm(dim=-1, keepdim=True), []
    for h, delta in zip(inputs, deltas, strict=True):
        norm = h.norm(dim=-1, keepdim=True) * delta.norm(dim=-1, keepdim=True)
        outside = norm > limit
        clipped.append(torch.where(outside, limit / torch.where(outside, norm, 1.0), 1.0) * delta)
    return clipped


def gradient_norm(inputs: list[Tensor], deltas: list[Tensor]) -> Tensor:
    """Computes the norm of each token's gradient over all layers: (B, H, T)."""
    norms = [h.norm(dim=-1) * delta.norm(dim=-1) for h, delta in zip(inputs, deltas, strict=True)]
    return torch.stack(norms).norm(dim=0)


def deep_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    log_eta: Tensor | None,
    log_retain: Tensor,
    m_0: Sequence[Tensor] | None,
    weights: Sequence[Tensor],
    momentum: Sequence[Tensor],
    anchor: Sequence[Tensor],
    filled: Tensor | None = None,
    chunk_starts: Tensor | None = None,
    *,
    network: Network,
    loss: Loss,
    clips: bool = False,
    chunk_size: int = 16,
    recompute: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Updates the memory with T tokens and reads the query of each token after the update by this token.

    Args:
        q, k, v: (B, H, T, D). All tensors have the dtype of the state.
        theta, log_eta, log_retain: (B, H, T), or (B, H, T, L) with gates for each layer; log_retain is log(1 - alpha).
            log_eta is None without momentum.
        m_0: (H, d_in, d_out) of each layer, the weights to which forgetting leads; None for 0, as the paper states it.
        weights, momentum: (B, H, d_in, d_out) of each layer before the first token; momentum is empty without one.
        anchor: the weights at the start of the chunk that the first token is in.
        filled: (B, T) bool, False at slots without a token, where results are undefined; None if all slots have one.
        chunk_starts: (P, B) bool, True where a chunk of C slots starts with a token of this call, False where the chunk
            began in an earlier call; None if all start in this call.
        network, loss: as the head of this file says.
        clips: clip the gradient of each layer at 4 |v| (`clip`).
        recompute: keep only the inputs of a chunk for the backward, which computes the chunk again.

    Returns o (B, H, T, D), the norm of each token's gradient (B, H, T), and weights, momentum and anchor after the last
    token.
    """
    tokens = [[None] if x is None else x.split(chunk_size, 2) for x in (q, k, v, theta, log_eta, log_retain)]
    slots = [None] * len(tokens[0]) if filled is None else filled.split(chunk_size, 1)
    tokens = [x * len(tokens[0]) if x == [None] else x for x in tokens]

    def chunk(q, k, v, theta, log_eta, log_retain, filled, weights, momentum, anchor):
        h, delta = gradient_factors(network, loss, anchor, k, v)
        delta = clip(h, delta, v) if clips else delta
        layers, after = [], []
        for i, (m, x, d) in enumerate(zip(weights, h, delta, strict=True)):
            step, eta, retain = (g if g is None or g.dim() == 3 else g[..., i] for g in (theta, log_eta, log_retain))
            target = torch.zeros_like(m) if m_0 is None else m_0[i]
            reader, *state = of_layer(x, d, step, eta, retain, target, m, momentum[i] if momentum else None, filled)
            layers.append(reader)
            after.append(state)
        ends, momenta = map(list, zip(*after, strict=True))
        return network(q, layers), gradient_norm(h, delta), ends, momenta if momentum else []

    outputs, norms = [], []
    for c, part in enumerate(zip(*tokens, slots, strict=True)):
        if chunk_starts is None:
            anchor = weights
        else:
            starts = chunk_starts[c][:, None, None, None]
            anchor = [torch.where(starts, m, a) for m, a in zip(weights, anchor, strict=True)]
        arguments = (*part, weights, momentum, anchor)
        if recompute:
            results = checkpoint(chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            results = chunk(*arguments)
        o, norm, weights, momentum = results
        outputs.append(o)
        norms.append(norm)
    return torch.cat(outputs, 2), torch.cat(norms, 2), list(weights), list(momentum), list(anchor)


def of_layer(
    h: Tensor,
    delta: Tensor,
    theta: Tensor,
    log_eta: Tensor | None,
    log_retain: Tensor,
    m_0: Tensor,
    m: Tensor,
    s: Tensor | None,
    filled: Tensor | None,
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor | None]:
    """Returns the linear map x -> x M_t of one layer in a chunk, M_t the weights after each token, and the layer's
    weights and momentum after the last token. m, s: those before the first token, (B, H, d_in, d_out).
    """
    steps, starts, decayed, to_momentum = unroll(
        theta, log_eta, log_retain, None if filled is None else filled[:, None]
    )
    beta, f = starts[..., :1], starts[..., 1:]  # (C, 1)

    def linear(x: Tensor) -> Tensor:
        start = beta * (x @ (m - m_0)) + x @ m_0  # (C, d_in) @ (d_in, d_out)
        start = start if s is None else start + f * (x @ s)
        return start - (steps * (x @ h.mT)) @ delta  # (C, C) @ (C, d_out)

    end = beta[..., -1:, :] * (m - m_0) + m_0 - (steps[..., -1, :, None] * h).mT @ delta  # (d_in, C) @ (C, d_out)
    if s is None or decayed is None or to_momentum is None:
        return linear, end, None
    end = end + f[..., -1:, :] * s
    return linear, end, decayed[..., -1:, :] * s - (to_momentum * h).mT @ delta

"""Other linear recurrent layers as special cases of the rules (the paper's appendix C, its second version's F)."""

import pytest
import torch
from torch.nn.functional import layer_norm, normalize
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from titans_hf.memory_deep import deep_rule, l2, make_network
from titans_hf.memory_rule import delta_rule

B, H, T, D = 2, 2, 11, 4
CHUNK = 4
DELTA, PLAIN, RESIDUAL = None, make_network("mlp", "silu"), make_network("residual", "gelu")


def gated_delta_net(M, k, v, beta, decay):
    """M (I - beta k k^T) decay + beta v k^T, for weights that are multiplied from the right."""
    M = decay * M
    return M + beta * k.mT @ (v - k @ M)


def linear_attention(M, k, v, beta, decay):
    """Mamba2's state: decay, and the step as input gate."""
    return decay * M + beta * k.mT @ v


def longhorn(M, k, v, beta, decay):
    """The minimum of |M' - M|^2 + beta |k M' - v|^2, by its normal equations."""
    return torch.linalg.solve(torch.eye(D).to(M) + beta * k.mT @ k, M + beta * k.mT @ v)


def ttt_linear(start, k, v, beta):
    """The gradient step of TTT's layer f(x) = x + LN(x W), without learned scales, at the weights of the mini-batch."""
    loss = (k + layer_norm(k @ start, (D,)) - v).square().sum()
    return beta * torch.autograd.grad(loss, start, create_graph=True)[0]


# The network (None: the delta rule), the steps, the factors of the values (from step, decay, |k|^2), and the chunk.
CASES = {
    gated_delta_net: (DELTA, lambda beta, decay, k: beta * decay / 2, lambda decay: 1 / decay, CHUNK),
    linear_attention: (PLAIN, lambda beta, decay, k: beta / 2, None, T),
    longhorn: (DELTA, lambda beta, decay, k: beta / (1 + beta * k) / 2, None, CHUNK),
    ttt_linear: (RESIDUAL, lambda beta, decay, k: beta, None, CHUNK),
}


def draw() -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, T, D, dtype=torch.float64) for _ in range(3))
    beta, decay = (0.1 + 0.8 * torch.rand(B, H, T, dtype=torch.float64) for _ in range(2))
    return [x.requires_grad_() for x in (q, 0.9 * normalize(k, dim=-1), v, beta, decay)]


def with_gradients(output: torch.Tensor, drawn: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.arange(output.numel()).to(output).sin().view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), drawn, allow_unused=True, materialize_grads=True)]


def recurrence(step, q, k, v, beta, decay) -> torch.Tensor:
    M = start = q.new_zeros(B, H, D, D, requires_grad=True)
    outputs = []
    for t in range(T):
        key, value, query = (x[:, :, t, None] for x in (k, v, q))
        if step is ttt_linear:
            start = start if t % CHUNK else M
            M = M - ttt_linear(start, key, value, beta[:, :, t, None, None])
            outputs.append(query + layer_norm(query @ M, (D,)))
        else:
            M = step(M, key, value, beta[:, :, t, None, None], decay[:, :, t, None, None])
            outputs.append(query @ M)
    return torch.cat(outputs, 2)


def by_the_rules(step, q, k, v, beta, decay) -> torch.Tensor:
    network, theta, scale, chunk_size = CASES[step]
    decays = step in (gated_delta_net, linear_attention)
    values = v if scale is None else v * scale(decay)[..., None]
    log_retain = decay.log() if decays else torch.zeros_like(decay)
    zeros = q.new_zeros(B, H, D, D)
    tokens = q, k, values, theta(beta, decay, k.square().sum(-1)), None, log_retain
    if network is None:
        return delta_rule(*tokens, zeros[0], zeros, None, chunk_size=chunk_size)[0]
    return deep_rule(*tokens, None, [zeros], [], [zeros], network=network, loss=l2, chunk_size=chunk_size)[0]


@pytest.mark.parametrize("step", CASES)
def test_it_is_a_special_case(step):
    """Outputs and gradients with respect to queries, keys, values, step and decay are those of the other layer."""
    drawn = draw()
    ours, theirs = (with_gradients(fn(step, *drawn), drawn) for fn in (by_the_rules, recurrence))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_gated_delta_net_is_that_of_transformers():
    """The same for Transformers' own recurrence, which computes in float32."""
    drawn = draw()
    q, k, v, beta, decay = (x.transpose(1, 2) for x in drawn)
    theirs = torch_recurrent_gated_delta_rule(q * D**0.5, k, v, decay.log(), beta)[0].transpose(1, 2)
    ours, theirs = (with_gradients(x, drawn) for x in (by_the_rules(gated_delta_net, *drawn), theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, check_dtype=False)

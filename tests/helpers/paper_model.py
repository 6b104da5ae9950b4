"""Computes the paper's literal model, eq. 10-16 and 21-31, with the memory network of its second version, head by head:
no limit of steps or errors, no decay target, no length of values. All else is `naive_model`."""

import torch
from naive_model import EPSILON, l2_normalize, naive_forward, rms_norm
from torch.nn.functional import gelu, silu


def network(weights, x):
    """M(x) = x + LN(W_L gelu(... gelu(W_1 x)))"""
    h = x
    for layer, w in enumerate(weights):
        h = (gelu(h) if layer else h) @ w
    return x + (h - h.mean()) / (h.var(correction=0) + 1e-5).sqrt()


class PaperMemory:
    """Each head's weights and momentum, a list of layers each; `inputs` are the convolutions' inputs so far."""

    def __init__(self, module, config):
        self.m, self.c, self.inputs, self.num_seen = module, config, [], 0
        layers = [w.detach() for w in module.initial_weights.parameters()]
        self.heads = [[w[head] for w in layers] for head in range(config.memory_num_heads)]
        self.momenta = [[torch.zeros_like(w) for w in weights] for weights in self.heads]
        self.anchors = self.heads

    def start_counting(self):
        """Starts a new chunk at the next token."""
        self.num_seen = 0

    def weights(self):
        """Returns the weights (H, d_in, d_out) of each layer."""
        return [torch.stack(layer) for layer in zip(*self.heads, strict=True)]

    def __call__(self, x):
        """Updates and reads the memory with one token: (hidden,) -> (hidden,)."""
        m, c = self.m, self.c
        if self.num_seen % c.memory_chunk_size == 0:  # eq. 16: gradients at the weights of the chunk's start
            self.anchors = list(self.heads)
        self.num_seen += 1
        self.inputs.append([proj.weight @ x for proj in (m.q_proj, m.k_proj, m.v_proj)])
        theta, eta, alpha = (
            torch.sigmoid(gate.weight @ x + gate.bias).view(c.memory_num_heads, c.memory_depth)
            for gate in (m.inner_lr, m.momentum, m.forget)
        )
        theta = c.memory_max_lr * theta
        convolutions = enumerate((m.q_conv, m.k_conv, m.v_conv))
        q, k, v = (silu(self.convolve(i, conv)).view(c.memory_num_heads, -1) for i, conv in convolutions)
        outputs = []
        for head in range(c.memory_num_heads):
            gradients = self.gradients(self.anchors[head], l2_normalize(k[head]), v[head])
            parts = zip(eta[head], self.momenta[head], theta[head], gradients, strict=True)
            self.momenta[head] = [e * s - t * g for e, s, t, g in parts]  # eq. 10, 14
            parts = zip(alpha[head], self.heads[head], self.momenta[head], strict=True)
            self.heads[head] = [(1 - a) * w + s for a, w, s in parts]  # eq. 13
            y = network(self.heads[head], l2_normalize(q[head]))  # eq. 15
            outputs.append(rms_norm(y, m.norm.weight, EPSILON))
        return m.o_proj.weight @ (torch.cat(outputs) * silu(m.gate_proj.weight @ x))

    def convolve(self, i, conv):
        """Convolves the last inputs of q, k or v: (hidden,)."""
        newest_first = [inputs[i] for inputs in self.inputs[: -self.c.memory_conv_kernel - 1 : -1]]
        return sum(conv.weight[:, 0, -1 - back] * x for back, x in enumerate(newest_first))

    @staticmethod
    def gradients(weights, k, v):
        """Computes the gradients of |M(k) - v|^2 (eq. 12)."""
        with torch.enable_grad():
            weights = [w.detach().requires_grad_() for w in weights]
            return torch.autograd.grad((network(weights, k) - v).square().sum(), weights)


def paper_forward(model, ids):
    """Computes logits (T, vocab) of ids (T,)."""
    return naive_forward(model, ids, PaperMemory)[0]

"""Computes the paper's literal model: eq. 10-16 and 21-31 as stated, and the memory network of its second version.

One row, token by token, head by head. It knows no limit of steps or errors, no initial weights that forgetting leads
back to, no length of values. Attention, norms and the loop over layers are those of `naive_model`.
"""

import torch
from naive_model import EPSILON, attend, l2_normalize, naive_forward, rms_norm, window_attention
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


def primed_memory(mixer, config):
    """Returns the memory after reading P, and its output for P; the next token starts a chunk."""
    memory = PaperMemory(mixer.memory, config)
    outputs = torch.stack([memory(token) for token in mixer.persistent])
    memory.num_seen = 0
    return memory, outputs


def lmm(mixer, config, x):
    memory, _ = primed_memory(mixer, config)
    return torch.stack([memory(token) for token in x]), None


def mal(mixer, config, x):
    memory, of_persistent = primed_memory(mixer, config)
    m = torch.stack([memory(token) for token in x])  # eq. 30
    m, of_persistent = (rms_norm(y, mixer.memory_norm.weight, config.rms_norm_eps) for y in (m, of_persistent))
    return window_attention(mixer.attention, config, m, of_persistent)  # eq. 31


def product(mixer, config, y, m):
    """norm(y) * sigmoid(norm(m)), y (x) M(x) in eq. 25 and 28"""
    y = rms_norm(y, mixer.attention_norm.weight, config.rms_norm_eps)
    return y * torch.sigmoid(rms_norm(m, mixer.memory_norm.weight, config.rms_norm_eps))


def mag(mixer, config, x):
    memory, _ = primed_memory(mixer, config)
    y, weights = window_attention(mixer.attention, config, x, mixer.persistent)  # eq. 27
    return product(mixer, config, y, torch.stack([memory(token) for token in x])), weights  # eq. 28


def mac(mixer, config, x):
    memory, recall, length, outputs = PaperMemory(mixer.memory, config), mixer.recall, config.segment_length, []
    for segment in x.split(length):
        rows = []
        for token in segment:  # h = M*(q), eq. 21
            q = silu(recall.q_proj.weight @ token).view(config.memory_num_heads, -1)
            y = [network(w, l2_normalize(query)) for w, query in zip(memory.heads, q, strict=True)]
            rows.append(recall.o_proj.weight @ rms_norm(torch.stack(y), recall.norm.weight, EPSILON).flatten())
        h, at = rms_norm(torch.stack(rows), recall.output_norm.weight, EPSILON), torch.arange(len(segment))
        mask, positions = (at[:, None] >= at).repeat(1, 2), (length + at, torch.cat([at, length + at]))
        keys = torch.cat([h, segment])  # eq. 22
        y = segment + attend(mixer.attention, config, segment, keys, positions, mask, mixer.persistent)[0]  # eq. 23
        m = torch.stack([memory(token) for token in y])  # eq. 24
        outputs.append(product(mixer, config, y, m))  # eq. 25
    return torch.cat(outputs), None


MIXERS = {"mac": mac, "mag": mag, "mal": mal, "lmm": lmm}


def paper_forward(model, ids):
    """Computes logits (T, vocab) of ids (T,)."""
    return naive_forward(model, ids, MIXERS)[0]

"""Computes the model by the paper's equations: one row, token by token, T x T masks, absolute positions. It shares no
code with the model except the autograd token loop of the memory."""

import math

import torch
from torch.nn.functional import gelu, layer_norm, relu, silu

from titans_hf.memory_reference import deep_rule_reference, delta_rule_reference

EPSILON = 1e-4  # in the norms of keys, queries, values and of the memory's output


def rms_norm(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def l2_normalize(x):
    return x / (x.norm(dim=-1, keepdim=True) ** 2 + EPSILON).sqrt()


def rotary(x, positions, config):
    """Rotates entries i and i + dims / 2 of x (N, h, D) by position times the i-th frequency."""
    x, half = x.clone(), config.rotary_dim // 2
    for i in range(half):
        angle = positions.double() * config.rope_parameters["rope_theta"] ** (-i / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., i].clone(), x[..., i + half].clone()
        x[..., i], x[..., i + half] = a * cos - b * sin, b * cos + a * sin
    return x


ACTIVATIONS = {"silu": silu, "gelu": gelu, "relu": relu, "identity": lambda x: x}


def network(config):
    """Returns the memory network M of a config."""

    def apply(x, layers):
        h = x
        for depth, layer in enumerate(layers):
            h = layer(ACTIVATIONS[config.memory_activation](h) if depth else h)
        return x + layer_norm(h, h.shape[-1:], eps=1e-5) if config.memory_network == "residual" else h

    return apply


def squared(prediction, value):
    return ((prediction - value) ** 2).sum(-1)


def huber(prediction, value):
    """Continues the squared error linearly where the error is longer than the value."""
    error, limit = (prediction - value).norm(dim=-1), value.norm(dim=-1)
    return torch.where(error > limit, 2 * limit * error - limit**2, error**2)


def features(config, x, hidden):
    """Computes the features of x (1, H, 1, D) by the hidden layers (H, d_in, d_out)."""
    for w in hidden:
        x = x @ w
        if config.memory_activation == "product":
            half = x.shape[-1] // 2
            x = x[..., :half] * x[..., half:]
            x = x / (x.norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt()
        else:
            x = ACTIVATIONS[config.memory_activation](x)
    return x


class NaiveMemory:
    """Computes a `NeuralMemory` token by token; `inputs` are the convolutions' inputs so far."""

    def __init__(self, module, config):
        self.m, self.c, self.inputs = module, config, []
        *self.hidden, _ = self.initial = list(module.initial_weights.parameters())
        self.is_deep = config.memory_update_rule == "chunk"
        learned = self.initial if self.is_deep else self.initial[-1:]
        self.learned = self.anchor = [w[None] for w in learned]
        self.momentum = [torch.zeros_like(w) for w in self.learned] if module.momentum is not None else []
        self.num_seen = torch.zeros(1, dtype=torch.int64)

    def start_counting(self):
        """Starts a new chunk at the next token."""
        self.num_seen = torch.zeros_like(self.num_seen)

    def weights(self):
        """Returns the weights (H, d_in, d_out) of each layer."""
        learned = [w[0] for w in self.learned]
        return learned if self.is_deep else [*self.hidden, *learned]

    def __call__(self, x):
        """Updates and reads the memory with one token: (hidden,) -> (hidden,)."""
        m, c = self.m, self.c
        self.inputs.append(torch.cat([proj.weight @ x for proj in (m.q_proj, m.k_proj, m.v_proj)]))
        mixed = self.inputs[-1]
        if c.memory_conv_kernel > 1:
            taps = torch.cat([m.q_conv.weight, m.k_conv.weight, m.v_conv.weight])[:, 0]
            mixed = sum(
                taps[:, c.memory_conv_kernel - 1 - back] * self.inputs[-1 - back]
                for back in range(min(c.memory_conv_kernel, len(self.inputs)))
            )
        q, k, v = silu(mixed).view(3, 1, c.memory_num_heads, 1, -1)
        stable, per_layer = c.memory_recurrence == "stable", self.is_deep and c.memory_recurrence == "paper"
        shape = (1, c.memory_num_heads, 1) + ((c.memory_depth,) if per_layer else ())
        gate = {
            name: torch.sigmoid(gate.weight @ x + gate.bias).view(shape)
            for name, gate in (("theta", m.inner_lr), ("eta", m.momentum), ("alpha", m.forget))
            if gate is not None
        }
        eta = gate.get("eta")
        alpha = gate.get("alpha", torch.zeros_like(gate["theta"]))
        if not self.is_deep:
            eta = None if eta is None else (eta / 3).clamp(min=math.exp(-5))
            alpha = alpha.clamp(max=0.6)
        theta = c.memory_max_lr * gate["theta"] * (1 - eta if stable and eta is not None else 1)
        tokens = l2_normalize(q), l2_normalize(k), l2_normalize(v) if stable else v
        gates = theta, None if eta is None else eta.log(), (1 - alpha).log()
        y = self.deep(*tokens, *gates, stable) if self.is_deep else self.delta(*tokens, *gates, stable)
        self.num_seen = self.num_seen + 1
        y = head_norm(c, y[0, :, 0], m.norm.weight).flatten()
        return m.o_proj.weight @ (y * silu(m.gate_proj.weight @ x))

    def delta(self, q, k, v, theta, log_eta, log_retain, stable):
        m_0 = self.initial[-1] if stable else torch.zeros_like(self.initial[-1])
        q, k = features(self.c, q, self.hidden), features(self.c, k, self.hidden)
        s = self.momentum[0] if self.momentum else None
        y, _, m, s = delta_rule_reference(q, k, v, theta, log_eta, log_retain, m_0, self.learned[0], s)
        self.learned, self.momentum = [m], [] if s is None else [s]
        return y

    def deep(self, q, k, v, theta, log_eta, log_retain, stable):
        is_huber = self.c.memory_loss == "huber"
        given = (self.initial if stable else None, self.learned, self.momentum, self.anchor, self.num_seen)
        options = dict(network=network(self.c), loss=huber if is_huber else squared, clips=is_huber)
        y, _, self.learned, self.momentum, self.anchor = deep_rule_reference(
            q, k, v, theta, log_eta, log_retain, *given, **options, chunk_size=self.c.memory_chunk_size
        )
        return y


def head_norm(config, y, weight):
    """Normalises what each head retrieves, (H, D): to RMS 1, or to at most length 1 and then as 1 to RMS 1."""
    if config.memory_output_norm == "rms":
        return rms_norm(y, weight, EPSILON)
    return y / y.norm(dim=-1, keepdim=True).clamp(min=1) * y.shape[-1] ** 0.5 * weight


def attend(attention, config, queries, keys, positions, mask, persistent):
    """Attends with queries (T, hidden) at positions[0] to keys (K, hidden) at positions[1] where mask (T, K) is True,
    and to persistent tokens (P, hidden): output (T, hidden), weights (heads, T, P + K)."""
    c, groups = config, config.num_attention_heads // config.num_key_value_heads

    def heads(proj, x):
        return (x @ proj.weight.T).unflatten(-1, (-1, c.head_dim))

    plain = heads(attention.q_proj, queries)
    q = rotary(plain, positions[0], c)
    everything = torch.cat([persistent, keys])
    k, v = heads(attention.k_proj, everything), heads(attention.v_proj, everything)
    first, k = k.split([len(persistent), len(keys)])
    k, met = rotary(k, positions[1], c), c.rotary_dim % c.head_dim  # P: entries without a position, or all as plain
    mask = torch.cat([torch.ones(len(queries), len(persistent), dtype=torch.bool), mask], 1)
    outputs, weights = [], []
    for head in range(c.num_attention_heads):
        of_persistent = plain[:, head, met:] @ first[:, head // groups, met:].T
        scores = torch.cat([of_persistent, q[:, head] @ k[:, head // groups].T], 1) / c.head_dim**0.5
        weights.append(scores.masked_fill(~mask, -torch.inf).softmax(-1))
        outputs.append(weights[-1] @ v[:, head // groups])
    return torch.cat(outputs, -1) @ attention.o_proj.weight.T, torch.stack(weights)


def window_attention(attention, config, x, persistent):
    """Attends from every token to itself, the W - 1 before it and P: output, weights (heads, T, P + T)."""
    positions = torch.arange(len(x))
    distance = positions[:, None] - positions
    mask = (distance >= 0) & (distance < config.sliding_window)
    return attend(attention, config, x, x, (positions, positions), mask, persistent)


def primed_memory(mixer, config, make_memory):
    """Returns the memory after reading P, and its output for P."""
    memory = make_memory(mixer.memory, config)
    outputs = [memory(token) for token in mixer.persistent]
    memory.start_counting()
    return memory, torch.stack(outputs) if outputs else mixer.persistent


def lmm(mixer, config, x, make_memory):
    memory, _ = primed_memory(mixer, config, make_memory)
    return torch.stack([memory(token) for token in x]), None


def mal(mixer, config, x, make_memory):
    memory, persistent_output = primed_memory(mixer, config, make_memory)
    m, eps = torch.stack([memory(token) for token in x]), config.rms_norm_eps  # eq. 30
    if config.memory_residual:
        norm, parts = mixer.sum_norm, (x + m, mixer.persistent + persistent_output)
    else:
        norm, parts = mixer.memory_norm, (m, persistent_output)
    inputs, persistent = (rms_norm(y, norm.weight, eps) for y in parts)
    y, weights = window_attention(mixer.attention, config, inputs, persistent)  # eq. 31
    if config.memory_residual:
        y = y * torch.sigmoid(rms_norm(m, mixer.memory_norm.weight, eps)) + m
    return y, weights


def mag(mixer, config, x, make_memory):
    memory, _ = primed_memory(mixer, config, make_memory)
    y, weights = window_attention(mixer.attention, config, x, mixer.persistent)  # eq. 27
    m = torch.stack([memory(token) for token in x])
    normed = rms_norm(m, mixer.memory_norm.weight, config.rms_norm_eps)
    if config.memory_residual:
        return y * torch.sigmoid(normed) + m, weights
    y = rms_norm(y, mixer.attention_norm.weight, config.rms_norm_eps)
    return y * torch.sigmoid(normed), weights  # eq. 28


def recall(module, config, x, weights):
    """Computes h of every token of a segment (T, hidden) from the memory's weights (H, d_in, d_out) at its start."""
    rows, is_deep = [], config.memory_update_rule == "chunk"
    for token in x:
        h = l2_normalize(silu(module.q_proj.weight @ token).view(config.memory_num_heads, 1, -1))
        if is_deep:
            h = network(config)(h, [lambda x, w=w: x @ w for w in weights])
        else:
            h = features(config, h[None], weights[:-1])[0] @ weights[-1]
        rows.append(module.o_proj.weight @ head_norm(config, h[:, 0], module.norm.weight).flatten())
    return rms_norm(torch.stack(rows), module.output_norm.weight, EPSILON)


def mac(mixer, config, x, make_memory):
    """Weights are (heads, T, P + 2 L): P, recalled tokens and segment slots of each token's own segment."""
    memory, length, eps = make_memory(mixer.memory, config), config.segment_length, config.rms_norm_eps
    outputs, attentions = [], []
    for segment in x.split(length):
        size = len(segment)
        h = recall(mixer.recall, config, segment, memory.weights())  # eq. 21
        at = torch.arange(size)
        mask, keys = (at[:, None] >= at).repeat(1, 2), torch.cat([h, segment])
        positions = length + at, torch.cat([at, length + at])
        attended, weights = attend(mixer.attention, config, segment, keys, positions, mask, mixer.persistent)
        y = segment + attended  # eq. 23
        m = torch.stack([memory(token) for token in y])  # eq. 24
        gate = torch.sigmoid(rms_norm(m, mixer.memory_norm.weight, eps))
        if config.memory_residual:
            outputs.append(attended * gate + m)
        else:
            outputs.append(rms_norm(y, mixer.attention_norm.weight, eps) * gate)  # eq. 25
        parts = weights.split([config.num_persistent_tokens, size, size], -1)
        empty = weights.new_zeros(*weights.shape[:2], length - size)
        attentions.append(torch.cat([parts[0], parts[1], empty, parts[2], empty], -1))
    return torch.cat(outputs), torch.cat(attentions, 1)


MIXERS = {"mac": mac, "mag": mag, "mal": mal, "lmm": lmm}


@torch.no_grad()
def naive_forward(model, ids, make_memory=NaiveMemory):
    """Computes logits (T, vocab) of ids (T,), and attention weights per layer, (heads, T, P + T or in MAC P + 2 L)."""
    config, eps = model.config, model.config.rms_norm_eps
    x, weights = model.model.embed_tokens.weight[ids], []
    for layer in model.model.layers:
        normed = rms_norm(x, layer.mixer_norm.weight, eps)
        mixed, attention = MIXERS[config.variant](layer.mixer, config, normed, make_memory)
        x, mlp = x + mixed, layer.mlp
        normed = rms_norm(x, layer.mlp_norm.weight, eps)
        up = silu(normed @ mlp.gate_proj.weight.T) * (normed @ mlp.up_proj.weight.T)
        x = x + up @ mlp.down_proj.weight.T
        weights.append(attention)
    return rms_norm(x, model.model.norm.weight, eps) @ model.lm_head.weight.T, weights

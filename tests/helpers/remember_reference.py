"""What a model with `remember` computes for one text, as slowly and plainly as it can be written: fast weights merged
into those of the model, W + B A, a 4-D mask over all keys so far, and a loop over the entries of the list."""

import copy
import math

import torch
from transformers import DynamicCache


def read_slowly(model, fast, window: int, ids: torch.Tensor, first_token: int, sink_block: int):
    """Returns the logits (T, V) of ids (T,) of the model itself, and B by name after the last token.

    model: without `remember`, with attention "sdpa"; it is not changed.
    """
    model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    original = {name: modules[name].weight.detach().clone() for name in fast.directions}
    dtype, rate = model.dtype, fast.step.start_rate
    start = {name: x.to(dtype) for name, x in fast.start.items()}
    share = 1.0 if rate is None else 0.0
    learned = {name: torch.zeros_like(x) for name, x in start.items()}  # B without its share of the start
    B = {name: share * x for name, x in start.items()}
    past = [[], []]  # keys and values of all layers so far, (1, H, P, D)
    logits, chunk = [], fast.step.chunk
    for begin in range(0, len(ids), chunk):
        here = ids[None, begin : begin + chunk]
        for name, w in original.items():
            merged = w + B[name] @ fast.directions[name].to(w.dtype)
            modules[name].weight = torch.nn.Parameter(merged)
        sink = sink_of(model, original, modules, first_token, max(0, begin // sink_block * sink_block - window))
        for name, w in original.items():
            modules[name].weight = torch.nn.Parameter(w + B[name] @ fast.directions[name].to(w.dtype))
        cache = DynamicCache()
        for layer, (key, value) in enumerate(sink):
            earlier = zip((key, value), past, strict=True)
            cache.update(*(torch.cat([x, *(p[layer] for p in kind)], -2) for x, kind in earlier), layer)
        columns = 1 + begin + here.shape[1]
        query = torch.arange(begin, begin + here.shape[1])[:, None]
        position = torch.arange(columns)[None] - 1
        allowed = (position <= query) & (query - position < window) & (position >= 0)
        allowed[:, 0] = query[:, 0] >= window
        mask = torch.zeros(allowed.shape, dtype=merged.dtype).masked_fill(~allowed, torch.finfo(merged.dtype).min)
        positions = torch.arange(begin, begin + here.shape[1])[None]
        output = model(here, attention_mask=mask[None, None], position_ids=positions, cache=cache)
        logits.append(output.logits[0].detach())
        for kind, name in zip(past, ("keys", "values"), strict=True):
            kind.append([getattr(x, name)[..., 1 + begin :, :].detach() for x in cache.layers])
        if begin + chunk < len(ids):  # all labels are known
            labels = ids[begin + 1 : begin + 1 + chunk]
            log_p = output.logits[0].log_softmax(-1)
            loss = -sum(log_p[i, labels[i]] for i in range(chunk)) / chunk
            of_weights = torch.autograd.grad(loss, [modules[name].weight for name in original])
            gradients = {x: g @ fast.directions[x].to(dtype).T for x, g in zip(original, of_weights, strict=True)}
            share -= sum((rate or 0.0) * (g * start[name]).sum() for name, g in gradients.items())
            for name, g in gradients.items():
                learned[name] = learned[name] - fast.rates[name] * g
                B[name] = share * start[name] + learned[name]
    return torch.cat(logits), B


@torch.no_grad()
def sink_of(model, original, modules, first_token: int, position: int) -> list:
    for name, w in original.items():
        modules[name].weight = torch.nn.Parameter(w)
    cache = DynamicCache()
    model(torch.tensor([[first_token]]), position_ids=torch.tensor([[position]]), cache=cache)
    return [(x.keys, x.values) for x in cache.layers]


def mix_slowly(chosen, ids: torch.Tensor, mlp_inputs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Returns the logits (T, V) mixed with the list, from those of the model, by loops over tokens and entries."""
    entries, mixed, keys = [], [], []
    u, w, b = (x.to(logits.dtype) for x in chosen.read_out)
    log_p = logits.log_softmax(-1)
    for t, token in enumerate(ids.tolist()):
        k = chosen.projection.to(logits.dtype).T @ (mlp_inputs[t] - chosen.center.to(logits.dtype))
        keys.append(k / k.norm())
        loss = -float(log_p[t - 1, token]) if t else 0.0
        if t and loss >= chosen.threshold:
            context = [int(ids[t - 1 - i]) if t - 1 - i >= 0 else None for i in range(2)]
            entries.append(((keys[t - 1] * 127).round() / 127, token, context, float(torch.tensor(loss))))
        held = entries[-chosen.entries :]
        if not held:
            mixed.append(logits[t])
            continue
        scores, same = [], []
        for key, word, context, loss in held:
            n = 0
            while n < 2 and t - n >= 0 and context[n] == int(ids[t - n]):
                n += 1
            facts = [float(keys[t] @ key), float(log_p[t, word]), loss, float(n >= 1), float(n >= 2)]
            scores.append(sum(float(x) * y for x, y in zip(u, facts, strict=True)))
            same.append(n)
        scores = torch.tensor(scores, dtype=logits.dtype)
        a = scores.softmax(0)
        m = torch.zeros_like(logits[t])
        for share, (_, word, *_rest) in zip(a, held, strict=True):
            m[word] += share
        p = log_p[t].exp()
        s, best = float(scores.logsumexp(0)) / 10, float(m[held[int(scores.argmax())][1]])
        h, count = float(-(p * log_p[t]).sum()) / 4, math.log(len(held)) / 5
        n = float((a * torch.tensor(same, dtype=a.dtype)).sum()) / 2
        share = torch.sigmoid(sum(float(x) * y for x, y in zip(w, [s, best, h, count, n], strict=True)) + b)
        mixed.append(((1 - share) * p + share * m).log() + logits[t].logsumexp(0))
    return torch.stack(mixed)

"""Checks the initial values of a model's parameters against the documented distributions."""

import re

import torch

from titans_hf.neural_memory import OUTPUT_SCALE

STD = 0.05  # `initializer_range` of the checked models: not the default, which a parameter could have by accident


def normal(std):
    def check(x):
        tolerance = 5 / (2 * x.numel()) ** 0.5
        assert abs(x.std(correction=0) / std - 1) < tolerance, f"std {x.std():.4f}, not {std:.4f}"
        assert abs(x.mean()) < 5 * std / x.numel() ** 0.5, f"mean {x.mean():.4f}, not 0"
        beyond = (x.abs() > std).double().mean()  # 0.317 of a normal distribution
        assert abs(beyond - 0.317) < 2.5 / x.numel() ** 0.5, f"{beyond:.3f} beyond one std: not normal"

    return check


def constant(value):
    def check(x):
        assert (x == value).all(), f"from {x.min()} to {x.max()}, not {value}"

    return check


def delay(num_tokens, noise):
    """Returns a check that filters (channels, 1, kernel) are a delay of `num_tokens` plus noise, whose squared norms
    add up to 1.
    """

    def check(x):
        rest = x.clone()
        rest[..., -1 - num_tokens] -= (1 - noise**2) ** 0.5
        normal(noise * x.shape[-1] ** -0.5)(rest) if noise else constant(0)(rest)

    return check


def rules(config) -> dict:
    """Returns {pattern of parameter names: check of the initial values}; every parameter matches exactly one
    pattern.
    """
    head_dim = config.memory_head_dim
    hidden = config.memory_expansion * head_dim
    layer = r"model\.layers\.\d+\."
    memory, token_memory = layer + r"mixer\.memory\.", r"model\.token_memory\.mixer\."
    fan_ins = [head_dim] + [hidden] * (config.memory_depth - 1)
    weights = {memory + rf"initial_weights\.{i}": normal(fan_in**-0.5) for i, fan_in in enumerate(fan_ins)}
    if config.memory_recurrence == "stable" and config.memory_network == "mlp":
        weights[memory + rf"initial_weights\.{config.memory_depth - 1}"] = constant(0)
    return weights | {
        r"model\.embed_tokens\.weight": normal(STD),
        r"lm_head\.weight": normal(STD),
        layer + r"mixer\.(memory|attention)\.o_proj\.weight": normal(OUTPUT_SCALE * STD),
        layer + r"(?!mixer\.(memory|attention)\.o_).*(q|k|v|o|gate|up|down)_proj\.weight": normal(STD),
        r".*norm\.weight": constant(1),
        memory + r"(inner_lr|momentum|forget)\.weight": constant(0),
        memory + r"(inner_lr|momentum)\.bias": constant(0),
        memory + r"forget\.bias": constant(-5),
        memory + r"[qv]_conv\.weight": delay(0, config.memory_conv_noise),
        memory + r"k_conv\.weight": delay(1, config.memory_conv_noise),
        layer + r"mixer\.persistent": normal(STD),
        token_memory + r"scale": constant(1),
        token_memory + r"(inner_lr|output_gate|forget)\.weight": constant(0),
        token_memory + r"(inner_lr|output_gate)\.bias": constant(0),
        token_memory + r"forget\.bias": constant(-7),
    }


def check_initial_values(model, only=None) -> None:
    """Checks the parameters, or those named in `only`, against the one rule that each name matches."""
    known = rules(model.config)
    for name, parameter in model.named_parameters():
        matching = [check for pattern, check in known.items() if re.fullmatch(pattern, name)]
        assert len(matching) == 1, f"{name}: {len(matching)} rules"
        if only is None or name in only:
            try:
                matching[0](parameter.detach().double())
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
    if model.config.token_memory_features and (only is None or "model.token_memory.mixer.directions" in only):
        normal(1)(model.model.token_memory.mixer.directions.double())
    values = [p for p in model.parameters() if p.unique().numel() > 2]
    for i, a in enumerate(values):
        assert not any(a.shape == b.shape and torch.equal(a, b) for b in values[:i]), "two parameters drawn alike"

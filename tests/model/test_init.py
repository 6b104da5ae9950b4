"""Initialisation: however a model is made, every parameter starts from the documented distribution."""

import re

import pytest
import torch
from common import ATTENTIONS, PAPER, make_config
from covering import covering
from transformers import AutoModelForCausalLM

from titans_hf import TitansForCausalLM
from titans_hf.neural_memory import OUTPUT_SCALE

STD = 0.05  # `initializer_range` of the checked models: not the default, which a parameter could have by accident
SIZES = dict(hidden_size=64, num_persistent_tokens=16, memory_depth=3, initializer_range=STD, num_hidden_layers=2)
SIZES |= dict(memory_conv_noise=0.7)


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
    """Returns a check that filters (channels, 1, kernel) of length 1 are a delay of `num_tokens` plus noise."""

    def check(x):
        rest = x.clone()
        rest[..., -1 - num_tokens] -= (1 - noise**2) ** 0.5
        normal(noise * x.shape[-1] ** -0.5)(rest) if noise else constant(0)(rest)

    return check


def rules(config) -> dict:
    """Returns {pattern of parameter names: check of the initial values}; each parameter matches one pattern."""
    head_dim = config.memory_head_dim
    hidden = config.memory_expansion * head_dim
    layer = r"model\.layers\.\d+\."
    memory = layer + r"mixer\.memory\."
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
        memory + r"forget\.bias": constant(config.memory_forget_bias),
        memory + r"[qv]_conv\.weight": delay(0, config.memory_conv_noise),
        memory + r"k_conv\.weight": delay(1, config.memory_conv_noise),
        layer + r"mixer\.persistent": normal(STD),
    }


def check_initial_values(model) -> None:
    """Checks the parameters against the one rule that each name matches."""
    known = rules(model.config)
    for name, parameter in model.named_parameters():
        matching = [check for pattern, check in known.items() if re.fullmatch(pattern, name)]
        assert len(matching) == 1, f"{name}: {len(matching)} rules"
        try:
            matching[0](parameter.detach().double())
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    values = [p for p in model.parameters() if p.unique().numel() > 2]
    for i, a in enumerate(values):
        assert not any(a.shape == b.shape and torch.equal(a, b) for b in values[:i]), "two parameters drawn alike"


@covering(
    2,
    {
        # With forgetting towards 0, or a norm behind it, the last layer is drawn too: else it would have no gradient.
        "changes": [
            {},
            dict(memory_conv_noise=0, memory_forget_bias=-7.5),
            dict(memory_update_rule="chunk", memory_recurrence="paper"),
            PAPER,
        ],
        "variant": ATTENTIONS,
    },
)
def test_a_new_model(changes, variant):
    """A new model has the documented initial values. Transformers' own tests compare the other ways to make one."""
    torch.manual_seed(0)
    check_initial_values(TitansForCausalLM(make_config(variant, **SIZES | changes)))


def test_the_embedding_of_padding_starts_at_zero():
    """Only the padding's row of a new embedding is 0, as in every model of Transformers."""
    weight = TitansForCausalLM(make_config("lmm", pad_token_id=3)).model.embed_tokens.weight
    assert (weight == 0).all(1).nonzero().tolist() == [[3]]


@covering(1, {"variant": ATTENTIONS, "changes": [{}, PAPER]})
def test_a_new_model_predicts_at_chance_and_its_gradients_are_alike(variant, changes):
    """A new model's loss is that of a uniform guess, and no first gradient exceeds 30 times the output layer's."""
    torch.manual_seed(0)
    model, ids = TitansForCausalLM(make_config(variant, **SIZES | changes)), torch.randint(50, (4, 40))
    loss = model(ids, labels=ids).loss
    assert abs(loss - torch.tensor(50.0).log()) < 0.25
    loss.backward()
    lengths = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    longest = max(lengths, key=lengths.get)
    assert lengths[longest] < 30 * lengths["lm_head.weight"], f"{longest}: {lengths[longest]:.2g}"


@pytest.mark.parametrize("start", ["recall", "random"])
def test_a_new_memory_that_starts_with_recall_retrieves_what_it_stored(start):
    """A new layer's output points at the token that followed; that of random weights ranks it at chance (100)."""
    torch.manual_seed(0)
    form = dict(memory_form="delta", hidden_size=128, memory_num_heads=1, memory_start=start)
    model = AutoModelForCausalLM.from_config(make_config("lmm", **form))
    embeddings, ids = torch.randn(200, 128), torch.randperm(200)[:40]
    retrieved = model.model.layers[0].mixer.memory(embeddings[torch.cat([ids, ids])][None])[0][0, 40:-1]
    scores = retrieved @ embeddings.T
    rank = (scores > scores.gather(1, ids[1:, None])).sum(1).float().median()
    assert rank < 40 if start == "recall" else rank > 80

"""The configuration: wrong values are refused by name, and left out fields are derived as documented."""

import json
import re
from functools import partial

import pytest
from common import PAPER, make_config, make_ids, make_model, shared_model
from covering import in_one_test
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, DynamicCache, StaticCache
from transformers.testing_utils import CaptureLogger

from titans_hf import TitansConfig, TitansForCausalLM, TitansTimeSeriesConfig
from titans_hf.configuration_titans import FORMS, field_facts, logger

REFUSALS = (ValueError, TypeError, StrictDataclassError)


def warnings_of(make) -> tuple[TitansConfig, str]:
    """Returns what `make()` returns, and the text of its warnings."""
    logger.warning_once.cache_clear()
    with CaptureLogger(logger) as captured:
        made = make()
    return made, captured.out


def test_derived_defaults():
    """Sizes left out are derived as documented, and given ones are kept."""
    derived = dict(num_key_value_heads=6, head_dim=8, memory_num_heads=6, memory_head_dim=8, rotary_dim=4)
    given = dict(num_key_value_heads=2, head_dim=12, memory_num_heads=3)
    for changes, expected in (({}, derived), (given, given)):
        config = TitansConfig(hidden_size=48, num_attention_heads=6, **changes)
        assert expected == {name: getattr(config, name) for name in expected}


def test_the_largest_step_and_momentum_follow_rule_depth_and_chunk():
    """Left out, the largest step is the rule's, and momentum is off only in the form "delta" with its own rule."""
    assert TitansConfig(memory_form="delta", memory_chunk_size=8).memory_max_lr == 1 / 2
    for depth, step in ((1, 1 / 8), (2, 1 / 8), (3, 1 / 12), (4, 1 / 16)):
        assert TitansConfig(memory_update_rule="chunk", memory_depth=depth, memory_chunk_size=8).memory_max_lr == step
    assert TitansConfig(memory_chunk_size=8, memory_max_lr=0).memory_max_lr == 0
    for form in ("titans", "delta", "paper"):
        assert TitansConfig(memory_form=form, memory_update_rule="chunk").memory_momentum is True
    assert TitansConfig(memory_network="residual").memory_update_rule == "chunk"  # it has no delta rule


@pytest.mark.parametrize("form", ["titans", "delta", "paper"])
def test_a_form_sets_the_fields_that_are_not_given(form, tmp_path):
    """`memory_form` sets the fields that are not given, and a saved config, which has all, does not depend on it."""
    config, expected = TitansConfig(memory_form=form), {name: row[form] for name, row in FORMS.items()}
    assert {name: getattr(config, name) for name in expected} == expected
    if form == "paper":
        assert {name: x for name, x in PAPER.items() if name in FORMS}.items() <= expected.items()
    config.save_pretrained(tmp_path)
    assert expected.items() <= json.loads((tmp_path / "config.json").read_text()).items()
    with pytest.raises(ValueError, match=r"`memory_form` cannot become .* in a saved config"):
        TitansConfig.from_pretrained(tmp_path, memory_form="delta" if form != "delta" else "titans")
    given = dict(memory_depth=3, memory_activation="relu", memory_residual=False, memory_chunk_size=32)
    assert {name: getattr(TitansConfig(memory_form=form, **given), name) for name in given} == given


def test_fields_beside_a_file_come_before_those_that_derive_from_them(tmp_path):
    """What is given beside a config.json that was written by hand is as if it stood in the file."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "titans", "memory_form": "titans"}))
    config = AutoConfig.from_pretrained(tmp_path, memory_form="delta", memory_chunk_size=8)
    expected = TitansConfig(memory_form="delta", memory_chunk_size=8)
    assert all(getattr(config, name) == getattr(expected, name) for name in field_facts(TitansConfig))


def test_a_misspelt_field_is_no_silent_ablation(tmp_path):
    """An unknown field of a memory is an error that names the one that was meant; another keyword is a warning."""
    TitansConfig().save_pretrained(tmp_path)
    for make in (TitansConfig, lambda **given: AutoConfig.from_pretrained(tmp_path, **given)):
        with pytest.raises(ValueError, match="`memory_from` is not a field of TitansConfig: is `memory_form` meant"):
            make(memory_from="delta")
    config, text = warnings_of(lambda: TitansConfig(sliding_windw=5, note="mine"))
    assert "`sliding_windw` is not a field of TitansConfig: is `sliding_window` meant?" in text and "`note`" in text
    assert config.sliding_window == 512 and config.note == "mine"


def test_what_transformers_and_other_versions_add_to_a_config(tmp_path):
    """Keywords of any config are taken without a word; a saved field of another version is a warning."""
    others = dict(num_labels=3, torch_dtype="float32", attn_implementation="eager", output_attentions=True)
    others |= dict(max_length=9, temperature=0.5, _commit_hash="1", auto_map={}, rope_theta=9.0)
    config, text = warnings_of(lambda: TitansConfig(**others))
    assert config.num_labels == 3 and not text
    config.save_pretrained(tmp_path)
    assert warnings_of(lambda: AutoConfig.from_pretrained(tmp_path))[1] == ""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"memory_of_2030": 1}))
    told = warnings_of(lambda: AutoConfig.from_pretrained(tmp_path))[1]
    assert "`memory_of_2030` in a saved config has no effect" in told


def test_updates_that_can_overshoot_warn(tmp_path):
    """A step above the rule's limit is named, as where a saved model's rule is changed and its step stays."""
    make_model("lmm", memory_form="delta").save_pretrained(tmp_path)
    assert not warnings_of(lambda: TitansForCausalLM.from_pretrained(tmp_path))[1]
    text = warnings_of(lambda: TitansForCausalLM.from_pretrained(tmp_path, memory_update_rule="chunk"))[1]
    assert "`memory_max_lr` (0.5) is above 0.25, its limit and default with memory_update_rule='chunk'" in text


NOT_A_NUMBER = float("nan")
BAD_VALUES = {
    "hidden_size": [0, -3, "4", 4.5],
    "head_dim": [0, 7],  # half of 7, which is rotated, is odd
    "sliding_window": [0, None],
    "num_persistent_tokens": [-1, 1.5, None],
    "memory_depth": [0],
    "memory_max_lr": [-0.1, NOT_A_NUMBER, float("inf"), "fast"],
    "memory_conv_noise": [-0.1],
    "memory_activation": ["tanh"],
    "memory_loss": ["l1"],
    "memory_recurrence": ["plain"],
    "variant": ["MAG", None],
    "attention_dropout": [NOT_A_NUMBER, 1.5],
    "rope_parameters": [
        *(
            "default",
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            {"rope_theta": 0.0},
            {"rope_theta": "x"},
        ),
        *({"partial_rotary_factor": x} for x in (1.5, 0.4, None)),  # .4 is 3 of 8 entries: odd
    ],
}


@in_one_test("name", BAD_VALUES)
def test_a_bad_value_is_refused_by_name(name):
    """Every wrong value raises an error that names its field, of a subclass with other defaults too."""
    for value in BAD_VALUES[name]:
        with pytest.raises(REFUSALS, match=name):
            make_config("mag", **{name: value})
    for field in ("hidden_size", "patch_length"):
        with pytest.raises(ValueError, match=f"`{field}` must be at least 1, but is 0"):
            TitansTimeSeriesConfig(**{field: 0})


@in_one_test(
    "changes",
    [
        dict(num_attention_heads=4, num_key_value_heads=3),
        dict(memory_network="residual", memory_update_rule="delta"),
        dict(memory_loss="huber"),
        dict(memory_update_rule="chunk", memory_activation="product"),
        dict(hidden_size=32, memory_num_heads=5),
        dict(variant="mac", segment_length=10, memory_chunk_size=4),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(changes):
    """Two sizes that contradict each other raise an error that names both."""
    with pytest.raises(REFUSALS) as error:
        make_config(**{"variant": "mag", **changes})
    assert all(name in str(error.value) for name in list(changes)[-2:])


@in_one_test("name,value", [("memory_max_lr", -1.0), ("segment_length", 12)])
def test_a_value_that_is_set_later_is_refused_too(name, value, tmp_path):
    """A wrong value is refused by its name: set on a config, by the config or its model, or given beside a folder."""
    shared_model("mac", segment_length=16, memory_chunk_size=8).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(REFUSALS, match=name):
        setattr(config, name, value)
        TitansForCausalLM(config)
    with pytest.raises(REFUSALS, match=name):
        TitansForCausalLM.from_pretrained(tmp_path, **{name: value})


@pytest.mark.parametrize("variant", ["mag", "lmm"])
def test_other_spellings_of_rope_parameters(variant):
    """Other spellings of rope parameters are honoured or refused; no two configs share them."""
    config = make_config(variant, partial_rotary_factor=1.0, rope_theta=5.0)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 1.0}
    given = {"rope_theta": 7.0}
    assert make_config(variant, rope_scaling=given).rope_parameters["partial_rotary_factor"] == 0.5
    with pytest.raises(ValueError, match=r"rope_parameters\['rope_type'\]` must be 'default'"):
        make_config(variant, rope_scaling={"type": "longrope", "factor": 4.0})
    make_config(variant, rope_parameters=given).rope_parameters["rope_theta"] = 1.0
    assert given == {"rope_theta": 7.0}


def test_a_cache_of_transformers_is_refused_at_once():
    """Transformers' caches, which no Titans reads, are refused where they are made, and the right class is named."""
    config = make_config("mag")
    for make in (DynamicCache, partial(StaticCache, max_cache_len=9)):
        with pytest.raises(ValueError, match=r"reads a `titans_hf.TitansCache\(config\)` and no other cache"):
            make(config=config)


def test_plans_are_dictionaries_of_strings():
    """The plans name every projection and no module that a variant has not, and stages in the order of the model."""
    assert {type(style) for style in TitansConfig.base_model_tp_plan.values()} == {str}
    for model in (make_model("mac"), make_model("lmm", memory_momentum=False, memory_conv_kernel=1)):
        names = {re.sub(r"\.\d+\b", ".*", name) for name, _ in model.named_modules()}
        split = {name for name in names if name.endswith(("_proj", "_conv", "momentum", "forget", "inner_lr"))}
        assert split < model.tp_plan.keys() <= names
        assert list(model.pp_plan) == ["lm_head", "model.embed_tokens", "model.layers", "model.norm"]


def test_the_memory_alone_has_no_attention():
    """LMM accepts attention sizes that the other variants refuse."""
    sizes = dict(hidden_size=8, num_attention_heads=16, memory_num_heads=2, num_key_value_heads=None)
    assert make_model("lmm", **sizes)(make_ids(1, 9)).logits.shape == (1, 9, 50)


def test_the_context_has_no_limit():
    """By a limit lm-eval's own class would cut prompts; it is no field of the configuration."""
    assert TitansConfig().n_positions > 2**32 and "n_positions" not in TitansConfig().to_dict()


def test_checkpoints_of_former_versions(tmp_path):
    """A saved config whose hidden layers learn by the delta rule is refused, with the way to convert it, and is then
    the default; other former fields become today's, or are refused where they would be read otherwise.
    """
    TitansConfig().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())

    def load(changes: dict, **given) -> TitansConfig:
        file.write_text(json.dumps(saved | {"memory_gates": "head", "memory_error_clip": 1.0} | changes))
        return AutoConfig.from_pretrained(tmp_path, **given)

    with pytest.raises(
        ValueError, match=r"hidden layers that learn while reading.*Load it with `memory_hidden_step=0`"
    ):
        load({"memory_hidden_step": None})
    config = load({"memory_hidden_step": None}, memory_hidden_step=0)
    assert config.memory_depth == 2 and not hasattr(config, "memory_hidden_step")
    assert load({"memory_hidden_step": None, "memory_depth": 1}).memory_depth == 1  # the former "delta"
    assert load({"memory_hidden_step": 0.0, "memory_kernel": "fla"}).memory_kernel == "auto"
    deep = {"memory_update_rule": "chunk", "memory_loss": None}
    assert load(deep).memory_loss == "huber" and load(deep | {"memory_error_clip": None}).memory_loss == "l2"
    for changes in ({"memory_error_clip": 0.3}, {"memory_gates": "layer"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            load(deep | changes)

"""The configuration: wrong values are refused by name, and left out fields are derived as documented."""

import json

import pytest
from common import PAPER, VARIANTS, make_config, make_ids, make_model, shared_model
from covering import covering, in_one_test
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, DynamicCache
from transformers.testing_utils import CaptureLogger

from titans_hf import TitansConfig, TitansForCausalLM, TitansTimeSeriesConfig, configuration_titans
from titans_hf.configuration_titans import TITANS_VERSION, field_facts, logger


def test_a_changed_default_keeps_the_rest_of_a_field():
    """A config class that gives a field another default checks the range of its base, and its own fields too."""
    facts, base = field_facts(TitansTimeSeriesConfig), field_facts(TitansConfig)
    assert all(facts[name] is base[name] for name in base) and len(facts) > len(base)
    for name in ("hidden_size", "patch_length"):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1, but is 0"):
            TitansTimeSeriesConfig(**{name: 0})


def test_derived_defaults():
    """Sizes left out are derived as documented, and given ones are kept."""
    config = TitansConfig(hidden_size=48, num_attention_heads=6)
    assert (config.num_key_value_heads, config.head_dim, config.memory_num_heads) == (6, 8, 6)
    assert (config.memory_head_dim, config.rotary_dim) == (8, 4)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = TitansConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=10, memory_num_heads=3,
        rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.2},
    )  # fmt: skip
    assert (config.num_key_value_heads, config.head_dim, config.memory_num_heads) == (2, 10, 3)
    assert (config.memory_head_dim, config.rotary_dim) == (16, 2)
    assert config.rope_parameters["rope_theta"] == 500.0


def test_the_largest_step_and_momentum_follow_rule_depth_and_chunk():
    """Left out, the largest step is the rule's, and momentum is off only in the form "delta" with its own rule."""
    assert TitansConfig(memory_form="delta", memory_chunk_size=8).memory_max_lr == 1 / 2
    for depth, step in ((1, 1 / 8), (2, 1 / 8), (3, 1 / 12), (4, 1 / 16)):
        assert TitansConfig(memory_update_rule="chunk", memory_depth=depth, memory_chunk_size=8).memory_max_lr == step
    assert TitansConfig(memory_chunk_size=8, memory_max_lr=0).memory_max_lr == 0
    for form in ("titans", "delta", "paper"):
        assert TitansConfig(memory_form=form, memory_update_rule="chunk").memory_momentum is True
    assert TitansConfig(memory_form="delta", memory_depth=2).memory_momentum is False
    assert TitansConfig(memory_network="residual").memory_update_rule == "chunk"  # it has no delta rule


def test_a_form_sets_the_fields_that_are_not_given(tmp_path):
    """`memory_form` sets the fields that belong together, a field that is given wins, None among them, and config.json
    holds what came out: a saved config does not depend on the forms.
    """
    titans = dict(memory_depth=2, memory_update_rule="delta", memory_momentum=True, memory_recurrence="stable")
    forms = {
        "titans": titans | dict(memory_max_lr=0.5),
        "delta": dict(memory_depth=1, memory_update_rule="delta", memory_momentum=False, memory_max_lr=0.5),
        "paper": PAPER | dict(memory_depth=2, memory_expansion=4, memory_momentum=True, memory_chunk_size=16),
    }
    for form, expected in forms.items():
        config = TitansConfig(memory_form=form)
        expected = {name: value for name, value in expected.items() if name.startswith("memory")}
        assert {name: getattr(config, name) for name in expected} == expected, form
        config.save_pretrained(tmp_path)
        assert expected.items() <= json.loads((tmp_path / "config.json").read_text()).items()
        with pytest.raises(ValueError, match=r"`memory_form` cannot become .* in a saved config"):
            TitansConfig.from_pretrained(tmp_path, memory_form="delta" if form != "delta" else "titans")
    given = dict(memory_depth=3, memory_error_clip=None, memory_residual=False, memory_chunk_size=32)
    config = TitansConfig(memory_form="titans", **given)
    assert {name: getattr(config, name) for name in given} == given


def test_fields_beside_a_file_come_before_those_that_derive_from_them(tmp_path):
    """What is given beside a config.json that was written by hand is as if it stood in the file."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "titans", "memory_form": "titans"}))
    config = AutoConfig.from_pretrained(tmp_path, memory_form="delta", memory_chunk_size=8)
    expected = TitansConfig(memory_form="delta", memory_chunk_size=8)
    assert all(getattr(config, name) == getattr(expected, name) for name in field_facts(TitansConfig))


def test_a_config_of_another_version_is_refused(tmp_path):
    """A saved config of another version, whose model computes something else, is refused."""
    config = make_config("lmm")
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).titans_version == TITANS_VERSION
    config.titans_version = TITANS_VERSION + 1
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=f"`titans_version` must be {TITANS_VERSION} here, but is {TITANS_VERSION + 1}"
    ):
        AutoConfig.from_pretrained(tmp_path)


def test_a_model_with_a_former_part_is_refused(tmp_path):
    """A saved model with a token memory, which models no longer have, is refused; one without it loads without a word.
    Loaded without its token memory, such a model would compute something else.
    """
    make_model("lmm").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"token_memory_features": 512}))
    for load in (AutoConfig.from_pretrained, TitansForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="`token_memory_features` in a saved config must be 0, but is 512"):
            load(tmp_path)
    file.write_text(json.dumps(saved | {"token_memory_features": 0}))
    config, text = warnings_of(lambda: AutoConfig.from_pretrained(tmp_path))
    assert not text and not hasattr(config, "token_memory_features")
    for make in (TitansConfig, TitansTimeSeriesConfig):
        with pytest.raises(ValueError, match="`token_memory_features` is not a field"):
            make(token_memory_features=8)


def warnings_of(make) -> tuple[TitansConfig, str]:
    """Returns what `make()` returns, and the text of its warnings."""
    configuration_titans.logger.warning_once.cache_clear()
    with CaptureLogger(configuration_titans.logger) as captured:
        made = make()
    return made, captured.out


def test_a_misspelt_field_is_no_silent_ablation(tmp_path):
    """An unknown keyword that begins as a field of a memory is an error that names the field that was meant; another
    one is a warning.
    """
    for make in (TitansConfig, lambda **given: AutoConfig.from_pretrained(tmp_path, **given)):
        with pytest.raises(ValueError, match="`memory_from` is not a field of TitansConfig: is `memory_form` meant"):
            TitansConfig().save_pretrained(tmp_path)
            make(memory_from="delta")
    config, text = warnings_of(lambda: TitansConfig(sliding_windw=5, note="mine"))
    assert "`sliding_windw` is not a field of TitansConfig: is `sliding_window` meant?" in text and "`note`" in text
    assert config.sliding_window == 512 and config.note == "mine"


def test_what_transformers_and_other_versions_add_to_a_config(tmp_path):
    """Keywords of any config are taken without a word; a saved field of a newer version is a warning."""
    others = dict(num_labels=3, torch_dtype="float32", attn_implementation="eager", output_attentions=True)
    others |= dict(max_length=9, temperature=0.5, _commit_hash="1", auto_map={}, rope_theta=9.0)
    config, text = warnings_of(lambda: TitansConfig(**others))
    assert config.num_labels == 3 and not text
    config.save_pretrained(tmp_path)
    assert warnings_of(lambda: AutoConfig.from_pretrained(tmp_path))[1] == ""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"memory_of_2030": 1}))
    loaded, text = warnings_of(lambda: AutoConfig.from_pretrained(tmp_path))
    assert "`memory_of_2030` in a saved config has no effect" in text
    assert not hasattr(loaded, "memory_of_2030")


def test_updates_that_can_overshoot_warn(tmp_path):
    """A step above the rule's limit is named, as where a saved model's rule is changed and its step stays; defaults are
    not.
    """
    logger.warning_once.cache_clear()  # of what earlier tests have been warned of
    make_model("lmm", memory_form="delta").save_pretrained(tmp_path)
    with CaptureLogger(logger) as quiet:
        TitansForCausalLM.from_pretrained(tmp_path)
        make_model("lmm", memory_update_rule="chunk")
    assert quiet.out == ""
    with CaptureLogger(logger) as step:
        TitansForCausalLM.from_pretrained(tmp_path, memory_update_rule="chunk")
    assert "`memory_max_lr` (0.5) is above 0.25, its limit and default with memory_update_rule='chunk'" in step.out


AT_LEAST_ONE = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "sliding_window", "segment_length", "memory_depth", "memory_expansion", "memory_num_heads",
    "memory_chunk_size", "memory_conv_kernel",
]  # fmt: skip
NOT_A_NUMBER = float("nan")
BAD_VALUES = {
    **{name: [0, -3, "4", 4.5] for name in AT_LEAST_ONE},
    "sliding_window": [0, -3, "4", 4.5, None],
    "num_persistent_tokens": [-1, 1.5, None],
    "memory_max_lr": [-0.1, NOT_A_NUMBER, float("inf"), "fast"],
    "memory_conv_noise": [-0.1],
    "memory_error_clip": [0, -1.0, NOT_A_NUMBER, "none"],
    "memory_recurrence": ["plain"],
    "memory_network": ["gelu"],
    "memory_gates": ["token"],
    "memory_momentum": ["yes"],
    "memory_forget": [None, 1],
    "variant": ["MAG", "titans", None],
    "attention_dropout": [-0.1, NOT_A_NUMBER, 1.5],
    "hidden_act": [3],
    "tie_word_embeddings": ["no"],
    "use_cache": [1],
    "initializer_range": [-0.1, "small"],
    "rms_norm_eps": [-0.1, None],
    "rope_parameters": [
        "default",
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0},
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": -0.5},
        {"partial_rotary_factor": 0.4},  # 3 of 8 entries: odd
        {"rope_theta": 0.0},
        {"rope_theta": -1.0},
        {"rope_theta": "x"},
        {"partial_rotary_factor": None},
    ],
}


@in_one_test("name", BAD_VALUES)
def test_a_bad_value_is_refused_by_name(name):
    """Every wrong value raises an error that names its field."""
    for value in BAD_VALUES[name]:
        with pytest.raises((ValueError, TypeError, StrictDataclassError), match=name):
            make_config("mag", **{name: value})


@in_one_test(
    "changes",
    [
        dict(num_attention_heads=4, num_key_value_heads=3),
        dict(memory_network="residual", memory_update_rule="delta"),
        dict(hidden_size=32, memory_num_heads=5),
        dict(hidden_size=30),
        dict(head_dim=7),  # half of it, which is rotated, is odd
        dict(variant="mac", segment_length=10, memory_chunk_size=4),
        dict(variant="mac", segment_length=4, memory_chunk_size=8),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(changes):
    """Two sizes that contradict each other raise an error that names both."""
    with pytest.raises((ValueError, StrictDataclassError)) as error:
        make_config(**{"variant": "mag", **changes})
    assert all(name in str(error.value) for name in list(changes)[-2:])


@in_one_test("name,value", [("memory_max_lr", -1.0), ("segment_length", 12)])
def test_a_value_that_is_set_later_is_refused_too(name, value, tmp_path):
    """A model refuses a wrong value by its name, set on a config or given to `from_pretrained`."""
    shared_model("mac", segment_length=16, memory_chunk_size=8).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    setattr(config, name, value)
    with pytest.raises((ValueError, StrictDataclassError), match=name):
        TitansForCausalLM(config)
    with pytest.raises((ValueError, StrictDataclassError), match=name):
        TitansForCausalLM.from_pretrained(tmp_path, **{name: value})


@covering(
    1,
    {
        "variant": VARIANTS,
        "changes": [
            {},
            dict(memory_error_clip=None),
            dict(memory_momentum=False, memory_forget=False),
            dict(head_dim=12),
            dict(rope_parameters={"rope_theta": 5.0, "partial_rotary_factor": 1.0}),
            dict(eos_token_id=[2, 3]),
            dict(memory_max_lr=1, memory_error_clip=2),
            dict(tie_word_embeddings=True, sliding_window=7),
        ],
    },
)
def test_round_trip_through_json(variant, changes, tmp_path):
    """A saved config loads with the same values, None included."""
    config = make_config(variant, **changes)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is TitansConfig and loaded.model_type == "titans"
    for name in field_facts(TitansConfig):
        assert getattr(loaded, name) == getattr(config, name), name
    assert all(getattr(loaded, name) == value for name, value in changes.items() if name != "rope_parameters")
    assert TitansConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("variant", ["mag", "lmm"])
def test_other_spellings_of_rope_parameters(variant):
    """`partial_rotary_factor`, `rope_theta` and `rope_scaling`, as other models' configs have them, are honoured or
    refused.
    """
    config = make_config(variant, partial_rotary_factor=1.0, rope_theta=5.0)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 1.0}
    assert make_config(variant, rope_scaling={"rope_theta": 7.0}).rope_parameters["partial_rotary_factor"] == 0.5
    for scaling in ({"rope_type": "dynamic", "factor": 2.0}, {"type": "longrope", "factor": 4.0}):
        with pytest.raises(ValueError, match=r"rope_parameters\['rope_type'\]` must be 'default'"):
            make_config(variant, rope_scaling=scaling)


def test_configs_do_not_share_rope_parameters():
    """Each config has its own copy of rope_parameters."""
    given = {"rope_theta": 7.0}
    first, second = make_config("mag", rope_parameters=given), make_config("mag", rope_parameters=given)
    first.rope_parameters["rope_theta"] = 1.0
    assert second.rope_parameters["rope_theta"] == 7.0 and given == {"rope_theta": 7.0}
    assert make_config("mag").rope_parameters["rope_theta"] == 10000.0


def test_layers_are_of_transformers_kinds():
    """A cache of Transformers has layers with a state, and a window or segment where the variant has one."""
    states = {
        "mac": "AndFullAttention",
        "mag": "AndSlidingWindowAttention",
        "mal": "AndSlidingWindowAttention",
        "lmm": "",
    }
    for variant, attention in states.items():
        layers = DynamicCache(config=make_config(variant)).layers
        assert [type(x).__name__ for x in layers] == [f"LinearAttention{attention}Layer"] * 2


def test_the_memory_alone_has_no_attention():
    """LMM accepts attention sizes that the other variants refuse."""
    for sizes in (dict(hidden_size=30, num_attention_heads=10), dict(hidden_size=8, num_attention_heads=16)):
        sizes |= dict(memory_num_heads=2, num_key_value_heads=None)
        model = make_model("lmm", **sizes)
        assert model(make_ids(1, 9)).logits.shape == (1, 9, 50)
        with pytest.raises(StrictDataclassError, match="head_dim"):
            make_config("mag", **sizes)

"""Options of titans-hf train: defaults, overrides of the configuration, and bad or contradicting ones."""

import json
import re
from dataclasses import replace
from unittest.mock import ANY

import pytest
from covering import in_one_test
from tiny_run import LLAMA, TITANS

from titans_hf.cli import train
from titans_hf.cli.training.model import load_config
from titans_hf.cli.training.size import count_parameters
from titans_hf.cli.training.tokenizer import byte_tokenizer
from titans_hf.cli.training.trainer_arguments import make_parser
from titans_hf_console import RunArguments

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")


@in_one_test("number,steps,accumulated", [(256, None, 4), (90, None, 1), (100, None, 2), (1, None, 1), (7, 3, 3)])
def test_tokens_per_step(options, number, steps, accumulated):
    """Unless it is given, gradient accumulation is the number of batches that is nearest to --tokens_per_step."""
    given = options(tokens_per_step=number, gradient_accumulation_steps=steps)
    run, training = make_parser().parse_args_into_dataclasses(given)
    train.check_arguments(run, training)
    assert training.gradient_accumulation_steps == accumulated


def test_an_error_of_arguments_is_two_lines(capsys):
    """A missing option ends in a line of usage and a line that names it, not under all options."""
    with pytest.raises(SystemExit):
        train.main(["--output_dir", "out"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: titans-hf train ") and "--train_data" in error


@in_one_test(
    "given,evaluated,saved,best",
    [
        ({}, ("steps", 0.05), ("steps", 0.05), True),
        ({"eval_steps": 2}, ("steps", 2), ("steps", 2), True),
        ({"save_steps": 4}, ("steps", 4), ("steps", 4), True),
        ({"eval_strategy": "epoch"}, ("epoch", 0.05), ("epoch", 0.05), True),
        ({"eval_strategy": "no"}, ("no", 0.05), ("steps", 0.05), False),
    ],
)
def test_saving_follows_evaluation(options, given, evaluated, saved, best):
    """Options of saving and of evaluation that were not given follow those that were."""
    parser = make_parser()
    *_, arguments = parser.parse_args_into_dataclasses(options(**({"eval_steps": None, "save_steps": None} | given)))
    assert (arguments.eval_strategy, arguments.eval_steps) == evaluated
    assert (arguments.save_strategy, arguments.save_steps) == saved
    assert arguments.load_best_model_at_end == best


@in_one_test(
    "config,overrides,expected",
    [
        (LLAMA | {"hidden_size": 64}, "hidden_size=32", {"hidden_size": 32, "head_dim": 16}),  # which follows from it
        (TITANS, "memory_momentum=False", {"memory_momentum": False}),
        (TITANS, "memory_momentum=false, hidden_size=48", {"memory_momentum": False, "hidden_size": 48}),
        (TITANS, "eos_token_id=null,variant=lmm", {"variant": "lmm"}),
        (LLAMA, 'rope_parameters={"rope_theta": 7.0, "rope_type": "default"}', {"rope_parameters": ANY}),
        (LLAMA, 'eos_token_id=[1,2], pad_token_id=3, architectures=["a,b"]', {"architectures": ["a,b"]}),
        ("tiny-mag", "", {"model_type": "titans", "variant": "mag"}),
    ],
)
def test_configurations_and_overrides(tmp_path, config, overrides, expected):
    """--config takes a file or a shipped name; overrides are of any JSON type, and derived sizes follow them."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    name = config if isinstance(config, str) else str(file)
    arguments = RunArguments(train_data="", config=name, config_overrides=overrides)
    found = load_config(arguments, byte_tokenizer())
    assert {name: getattr(found, name) for name in expected} == expected
    assert "rope_theta" not in overrides or found.rope_parameters["rope_theta"] == 7.0


def test_too_few_steps_are_warned_of(options, capsys):
    """A warning before training names --tokens_per_step if steps are few."""
    train.main(options(max_steps=None, eval_strategy="no", save_strategy="no", load_best_model_at_end="false"))
    assert re.search(r"steps: \d+, too few to learn from: give a smaller --tokens_per_step", capsys.readouterr().out)


@in_one_test(
    "config,overrides,fixed",
    [
        ("tiny-mag", "", {}),
        ("tiny-llama", "", {}),
        ("tiny-mag", "hidden_size=64", {"hidden_size": 64}),
        ("tiny-mag", "intermediate_size=512", {"intermediate_size": 512}),
    ],
)
def test_a_size_is_found(config, overrides, fixed):
    """A new model has the parameters asked for, its MLPs in proportion, and keeps the width that was given."""
    number = 600_000
    run = RunArguments("", config=config, config_overrides=overrides, num_parameters=number)
    made, before = load_config(run, byte_tokenizer()), load_config(replace(run, num_parameters=None), byte_tokenizer())
    assert abs(count_parameters(made) / number - 1) < (0.15 if "intermediate_size" in fixed else 0.02)
    assert fixed.items() <= made.to_dict().items()
    if not fixed:
        ratios = [x.intermediate_size / x.hidden_size for x in (made, before)]
        assert ratios[0] == pytest.approx(ratios[1], rel=0.4) and made.hidden_size != before.hidden_size

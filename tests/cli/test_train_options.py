"""Options of titans-hf train: defaults, overrides of the configuration, and bad or contradicting ones."""

import json
import re

import pytest
import torch
from covering import in_one_test
from tiny_run import LLAMA, TITANS

from titans_hf.cli import train
from titans_hf.cli.training.arguments import RunArguments
from titans_hf.cli.training.model import load_config, parse_overrides
from titans_hf.cli.training.tokenizer import byte_tokenizer, load_tokenizer
from titans_hf.cli.training.trainer_arguments import make_parser

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")


@pytest.mark.parametrize(
    "given,accumulated",
    [
        ({"tokens_per_step": 256}, 4),
        ({"tokens_per_step": 90}, 1),
        ({"tokens_per_step": 100}, 2),
        ({"tokens_per_step": 1}, 1),
        ({"gradient_accumulation_steps": 3, "tokens_per_step": 7}, 3),
    ],
)
def test_tokens_per_step(options, tmp_path, capsys, given, accumulated):
    """Unless it is given, gradient accumulation is the number of batches that is nearest to --tokens_per_step."""
    train.main(options(max_steps=1, **given))
    arguments = torch.load(tmp_path / "out" / "training_args.bin", weights_only=False)
    assert arguments.gradient_accumulation_steps == accumulated
    assert "steps: 1\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "run.json").read_text())["tokens_seen"] == accumulated * 2 * 32


def test_help_of_all_options(capsys):
    """--help has the command's own options, --help_all those of TrainingArguments too."""
    for option, has_all in (("--help", False), ("--help_all", True)):
        with pytest.raises(SystemExit) as ended:
            train.main([option])
        text = capsys.readouterr().out
        assert not ended.value.code and "--block_length" in text and ("--torch_compile_backend" in text) == has_all


def test_paper_defaults(options):
    """Defaults are the paper's learning rate, weight decay, schedule, optimizer and tokens per step."""
    parser = make_parser()
    *_, arguments = parser.parse_args_into_dataclasses(options(learning_rate=None))
    assert (arguments.learning_rate, arguments.weight_decay, arguments.lr_scheduler_type) == (4e-4, 0.1, "cosine")
    assert arguments.optim.startswith("adamw")
    assert parser.get_default("tokens_per_step") == 524288


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
    """Options of saving and of evaluation that were not given follow those that were. If they kept a default of their
    own, a command with --eval_steps alone would be refused for an option that nobody gave.
    """
    parser = make_parser()
    *_, arguments = parser.parse_args_into_dataclasses(options(**({"eval_steps": None, "save_steps": None} | given)))
    assert (arguments.eval_strategy, arguments.eval_steps) == evaluated
    assert (arguments.save_strategy, arguments.save_steps) == saved
    assert arguments.load_best_model_at_end == best


def test_overrides_rebuild_the_config(options):
    """Sizes derived from an overridden field follow it."""
    config = LLAMA | {"hidden_size": 64}
    path = options(config)[1]
    arguments = RunArguments(train_data="", config=path, config_overrides="hidden_size=32,tie_word_embeddings=true")
    changed = load_config(arguments, load_tokenizer("bytes"))
    assert (changed.hidden_size, changed.head_dim, changed.tie_word_embeddings) == (32, 16, True)


@in_one_test(
    "overrides,expected",
    [
        ("memory_momentum=False", {"memory_momentum": False}),
        ("memory_momentum=false, hidden_size=48", {"memory_momentum": False, "hidden_size": 48}),
        ("eos_token_id=null,variant=lmm", {"variant": "lmm"}),
        ('rope_parameters={"rope_theta": 7.0, "rope_type": "default"}', {"rope_parameters": {"rope_theta": 7.0}}),
    ],
)
def test_overrides_of_every_type(tmp_path, overrides, expected):
    """Overrides can be booleans, null, nested fields and dictionaries."""
    (tmp_path / "config.json").write_text(json.dumps(TITANS))
    arguments = RunArguments(train_data="", config=str(tmp_path / "config.json"), config_overrides=overrides)
    config = load_config(arguments, byte_tokenizer())
    for name, value in expected.items():
        actual = getattr(config, name)
        if isinstance(value, dict):
            assert value.items() <= dict(actual).items()
        else:
            assert actual == value and type(actual) is type(value)


@in_one_test(
    "overrides,message",
    [
        ("memory_momentum=maybe", "(?s)--config_overrides memory_momentum=maybe: .*bool"),
        ("memory_momentums=1", "titans has no memory_momentums"),
        ("hidden_size", "(?s)--config_overrides hidden_size: .*int"),
    ],
)
def test_wrong_overrides_are_named(tmp_path, overrides, message):
    """A wrong override raises an error that names it."""
    (tmp_path / "config.json").write_text(json.dumps(TITANS))
    arguments = RunArguments(train_data="", config=str(tmp_path / "config.json"), config_overrides=overrides)
    with pytest.raises(ValueError, match=message) as error:
        load_config(arguments, byte_tokenizer())
    assert "StrictDataclass" not in str(error.value)


def test_commas_within_values_do_not_split():
    """Commas within brackets and quotes belong to a value."""
    assert parse_overrides('a=[1,2],b={"x": "p,q"}, c=3') == {"a": [1, 2], "b": {"x": "p,q"}, "c": 3}


def test_shipped_configurations_have_names():
    """`--config tiny-mag` works from any folder."""
    config = load_config(RunArguments(train_data="", config="tiny-mag"), byte_tokenizer())
    assert (config.model_type, config.variant) == ("titans", "mag")


@in_one_test(
    "changes,message",
    [
        ({"train_data": "/no/such/folder"}, "/no/such/folder is neither a file, nor a folder, nor a data set"),
        ({"eval_data": "/no/such/file.txt"}, "/no/such/file.txt is neither"),
        ({"train_data": "no-such/data"}, "no-such/data is neither"),
        ({"config": "/no/such/config.json"}, "/no/such/config.json is not a checkpoint: no such folder"),
        ({"block_length": 1}, "--block_length must be at least 2, but is 1"),
        ({"block_length": 4096, "tokens_per_step": 8192}, "give --eval_data"),
        ({"text_column": "body"}, "no text in a --text_column body, but {'text': 'string'}"),
        (
            {"config_overrides": "vocab_size=100"},
            "has 259 tokens, more than the vocab_size 100: .* --config_overrides vocab_size=259",
        ),
        ({"config_overrides": "hiden_size=64"}, "llama has no hiden_size"),
        ({"resume_from_checkpoint": "true"}, "true: no complete checkpoint"),
        ({"resume_from_checkpoint": "/no/such/checkpoint"}, "/no/such/checkpoint: no complete checkpoint"),
    ],
)
def test_bad_inputs_are_named(options, tmp_path, changes, message):
    """Wrong options raise an error that names them before any file is written."""
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train.main(options(**changes))
    assert not (tmp_path / "out").exists()


@in_one_test(
    "changes,message",
    [
        ({"config": None}, "give either --config and --tokenizer, .*, or --model_name_or_path"),
        ({"model_name_or_path": "x"}, "give either --config and --tokenizer, .*, or --model_name_or_path"),
        ({"tokenizer": None}, "give either --config and --tokenizer, .*, or --model_name_or_path"),
        ({"tokens_per_step": -128}, "--tokens_per_step must be at least 1, but is -128"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps must be at least 1, but is 0"),
        ({"gradient_accumulation_steps": -2}, "--gradient_accumulation_steps must be at least 1, but is -2"),
        ({"max_eval_blocks": -3}, "--max_eval_blocks must be at least 1, but is -3"),
        ({"tokenizer": "no-such-tokenizer"}, "--tokenizer no-such-tokenizer has no tokenizer: no such folder"),
        (
            {"config": None, "tokenizer": None, "model_name_or_path": "no-such-model"},
            "--model_name_or_path no-such-model has no tokenizer: no such folder",
        ),
        ({"config": __file__}, "--config .*test_train_options.py is not a checkpoint: its configuration does not load"),
    ],
)
def test_options_that_contradict_are_refused(options, tmp_path, changes, message):
    """Contradicting or missing options raise an error that names them before any file is written."""
    with pytest.raises(ValueError, match=message):
        train.main(options(**changes))
    assert not (tmp_path / "out").exists()


def test_folder_without_text_is_named(options, tmp_path):
    """A folder without text raises an error that names it."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"--train_data .*empty holds no \.txt or \.md or .*files"):
        train.main(options(train_data=tmp_path / "empty"))
    (tmp_path / "empty" / "empty.txt").touch()
    with pytest.raises(ValueError, match="holds no text"):
        train.main(options(train_data=tmp_path / "empty"))


def test_tokenizer_without_eos_is_named(options, tmp_path):
    """A tokenizer without eos raises an error."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="no eos token"):
        train.main(options(tokenizer=tmp_path / "tokenizer"))


def test_too_few_steps_are_warned_of(options, capsys):
    """A warning before training names --tokens_per_step if steps are few."""
    train.main(options(max_steps=None, eval_strategy="no", save_strategy="no", load_best_model_at_end="false"))
    assert re.search(r"steps: \d+, too few to learn from: give a smaller --tokens_per_step", capsys.readouterr().out)

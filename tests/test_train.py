"""scripts/train.py: packing, resuming, bad input, and a tiny run from text to a pipeline."""

import json
import math
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import torch
from common import VARIANTS
from datasets import Dataset, DatasetDict
from tiny_run import LAUNCH, LLAMA, TITANS, StopAt
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, pipeline
from transformers.trainer_utils import get_last_checkpoint

from titans_hf_scripts import train
from titans_hf_scripts.training import blocks as data
from titans_hf_scripts.training.arguments import DataArguments, ModelArguments
from titans_hf_scripts.training.data import load_blocks
from titans_hf_scripts.training.documents import load_splits
from titans_hf_scripts.training.model import load_config
from titans_hf_scripts.training.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")


CONFIGS = {"llama": LLAMA, "mistral": LLAMA | {"model_type": "mistral"}, "titans": TITANS}
DROPOUT = {"attention_dropout": 0.1}
RESUMED = {"llama": LLAMA | DROPOUT} | {variant: TITANS | DROPOUT | {"variant": variant} for variant in VARIANTS}


def real_tokens(blocks):
    return [token for block in blocks["input_ids"] for token in block.tolist()]


def losses(folder, key):
    history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [(log["step"], log[key]) for log in history if key in log]


@pytest.mark.parametrize("block_length", [2, 7, 32, 10_000])
def test_packing_loses_no_text(texts, block_length):
    """Blocks join to all documents with an eos each, in order: otherwise a part of the text would not be learnt."""
    tokenizer = load_tokenizer("bytes")
    documents = load_splits(str(texts), "--train_data", "train")["train"]
    blocks, tokens_per_byte = data.make_blocks(documents, "text", tokenizer, block_length)

    encoded = [path.read_bytes() for path in sorted(texts.rglob("*.txt"))]
    stream = [token for text in encoded for token in [*(byte + 3 for byte in text), tokenizer.eos_token_id]]
    assert real_tokens(blocks) == stream[: len(stream) - (len(stream) % block_length == 1)]
    assert {len(block) for block in blocks["input_ids"][:-1]} <= {block_length}
    assert data.count_tokens(blocks) == len(real_tokens(blocks))
    assert tokens_per_byte == len(real_tokens(blocks)) / len(b"".join(encoded))


def test_only_a_lone_final_eos_is_dropped():
    """A last block is dropped only if it is an eos alone, which leaves nothing to predict: otherwise text would be
    lost.
    """
    documents = Dataset.from_dict({"text": ["abcd"]})
    blocks, _ = data.make_blocks(documents, "text", load_tokenizer("bytes"), 4)
    assert real_tokens(blocks) == [100, 101, 102, 103]


def test_without_packing_every_document_is_a_block():
    """Without packing each document is one block, or an error: otherwise a question could be in another block than its
    fact.
    """
    tokenizer = load_tokenizer("bytes")
    documents = Dataset.from_dict({"text": ["abc", "", "d", "efghijk"]})
    blocks, tokens_per_byte = data.make_blocks(documents, "text", tokenizer, 8, packing=False)
    assert [tokenizer.decode(block) for block in blocks["input_ids"]] == ["abc</s>", "d</s>", "efghijk</s>"]
    assert data.count_tokens(blocks) == 14 and data.count_tokens(blocks.select([2, 0])) == 12
    assert tokens_per_byte == 14 / 11
    with pytest.raises(ValueError, match="document 3 has 8 tokens with its eos, more than --block_length 7"):
        data.make_blocks(documents, "text", tokenizer, 7, packing=False)


def test_prompts_are_read_and_completions_learnt(options, tmp_path, monkeypatch):
    """The loss covers completions alone: otherwise it would mostly be that of given prompts."""
    rows = {"prompt": ["2 + 2 =", "", "7 = "], "completion": [" 4", "yes", "x" * 40]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    tokenizer = load_tokenizer("bytes")
    blocks, tokens_per_byte = data.make_blocks(Dataset.from_dict(rows), "text", tokenizer, 64, packing=False)
    batch = data.collate([blocks[i] for i in range(2)])
    assert tokenizer.decode(batch["input_ids"][0]) == "2 + 2 = 4</s>"
    learnt = [tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert learnt == [" 4</s>", "yes</s>"] and tokens_per_byte == 59 / 56
    common = dict(train_data=tmp_path / "rows", eval_data=tmp_path / "rows", block_length=64, max_steps=4)
    with pytest.raises(ValueError, match="only prompt, completion: these need --packing false"):
        train.main(options(**common))
    seen = []
    monkeypatch.setattr(train, "collate", lambda blocks: seen.append(data.collate(blocks)) or seen[-1])
    train.main(options(packing="false", **common))
    completions = (3, 4, 41)  # tokens
    sums = {sum(some) for number in (1, 2, 3) for some in combinations(completions, number)}
    assert {(x["labels"] != -100).sum().item() for x in seen} <= sums


def test_blocks_are_cached(texts, monkeypatch):
    """Blocks of the same data are read from the cache: otherwise every start would tokenize the data again."""
    tokenizer = load_tokenizer("bytes")
    first, _ = data.make_blocks(load_splits(str(texts), "--train_data", "train")["train"], "text", tokenizer, 32)
    monkeypatch.setattr(type(tokenizer), "__call__", None)
    again, _ = data.make_blocks(
        load_splits(str(texts), "--train_data", "train")["train"], "text", load_tokenizer("bytes"), 32
    )
    assert real_tokens(again) == real_tokens(first)


def test_held_out_blocks_are_the_last(texts):
    """The last blocks are held out and the others kept: otherwise evaluation would use training data."""
    tokenizer = load_tokenizer("bytes")
    blocks, _ = data.make_blocks(load_splits(str(texts), "--train_data", "train")["train"], "text", tokenizer, 32)
    arguments = DataArguments(train_data=str(texts), eval_fraction=0.2, block_length=32)
    kept, held_out, _ = load_blocks(arguments, tokenizer)
    assert len(held_out) == round(0.2 * len(blocks))
    assert real_tokens(kept) + real_tokens(held_out) == real_tokens(blocks)


def test_saved_data_set_brings_its_validation_split(tmp_path):
    """A saved data set's validation split is used for evaluation: otherwise training data would be held out instead."""
    splits = {"train": Dataset.from_dict({"body": ["aaaa", "bb"]}), "validation": Dataset.from_dict({"body": ["cc"]})}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    tokenizer = load_tokenizer("bytes")
    arguments = DataArguments(train_data=str(tmp_path / "saved"), text_column="body", block_length=32)
    kept, validation, _ = load_blocks(arguments, tokenizer)
    assert tokenizer.decode(real_tokens(kept)) == "aaaa</s>bb</s>"
    assert tokenizer.decode(real_tokens(validation)) == "cc</s>"


def test_byte_tokenizer_is_byt5_without_the_eos(tmp_path):
    """The saved byte tokenizer has ByT5's ids, without an eos, and decodes exactly: otherwise text would be changed."""
    load_tokenizer("bytes").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Ünïcode 東京 🎉\r\n\t\x00  end "
    byt5 = ByT5Tokenizer(extra_ids=0)
    assert len(tokenizer) == len(byt5) == 259
    assert tokenizer(text)["input_ids"] == byt5(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for name in ("pad_token_id", "eos_token_id", "unk_token_id"):
        assert getattr(tokenizer, name) == getattr(byt5, name)


def block(tokens, prompt_length=0):
    return {"input_ids": torch.tensor(tokens), "prompt_length": torch.tensor(prompt_length)}


def test_collate_masks_only_padding():
    """Padding alone is masked and left out of the loss, and equal rows have no mask: otherwise tokens equal to the
    padding's id would not be learnt.
    """
    batch = data.collate([block([5, 6, 7]), block([8, 0])])
    assert batch["labels"].tolist() == [[5, 6, 7], [8, 0, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert "attention_mask" not in data.collate([block([5, 0])])


@pytest.mark.parametrize("model_type", CONFIGS)
def test_training_gives_a_model_that_loads_and_generates(options, tmp_path, texts, model_type):
    """A trained model loads with the reported losses, generates, and has its files: otherwise a run could not
    be used.
    """
    metrics = train.main(options(CONFIGS[model_type], eval_data=texts))

    folder = tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == model_type
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (None, 1, 0)

    blocks, tokens_per_byte = data.make_blocks(
        load_splits(str(texts), "--eval_data", "validation")["validation"], "text", tokenizer, 32
    )
    with torch.no_grad():
        outputs = [(model(block[None], labels=block[None]).loss, len(block) - 1) for block in blocks["input_ids"]]
    loss = sum(mean.item() * count for mean, count in outputs) / sum(count for _, count in outputs)
    assert metrics["eval_loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["eval_loss"] == pytest.approx(min(value for _, value in losses(folder, "eval_loss")))
    assert metrics["eval_loss"] < math.log(320) - 1
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert metrics["eval_bits_per_byte"] == pytest.approx(metrics["eval_loss"] / math.log(2) * tokens_per_byte)

    assert json.loads((folder / "eval_results.json").read_text())["eval_perplexity"] == metrics["eval_perplexity"]
    assert json.loads((folder / "run.json").read_text())["steps"] == 8
    assert (folder / "loss.png").stat().st_size > 0

    generate = pipeline("text-generation", model=str(folder), device="cpu")
    text = generate("Zwölf", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert text.startswith("Zwölf")


@pytest.mark.parametrize("config", RESUMED.values(), ids=RESUMED)
def test_resumed_run_is_bit_identical(options, tmp_path, monkeypatch, config):
    """A resumed run has the weights and losses of an uninterrupted one: otherwise an interruption would change the
    result.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    metrics = train.main(options(config, output_dir=whole))
    monkeypatch.setattr(train, "TimeLimit", StopAt)
    monkeypatch.setattr(StopAt, "steps", [])
    train.main(options(config, output_dir=parts, max_minutes=4))
    assert StopAt.steps == [1, 2, 3, 4]
    resumed = train.main(options(config, output_dir=parts, max_minutes=8, resume_from_checkpoint="true"))
    assert StopAt.steps == list(range(1, 9))

    for checkpoint in ("checkpoint-8", "."):
        first, second = (AutoModelForCausalLM.from_pretrained(run / checkpoint).state_dict() for run in (whole, parts))
        assert all(torch.equal(first[name], second[name]) for name in first)
    for key in ("loss", "eval_loss"):
        assert losses(whole, key) == losses(parts, key)
    assert resumed["eval_loss"] == metrics["eval_loss"]


def test_time_limit_stops_evaluates_and_saves(options, tmp_path):
    """--max_minutes ends a run with an evaluation and a checkpoint: otherwise a limited run would be lost."""
    train.main(options(max_minutes=1e-9))
    assert get_last_checkpoint(tmp_path / "out").endswith("checkpoint-1")
    assert [step for step, _ in losses(tmp_path / "out", "eval_loss")] == [1]


@pytest.mark.parametrize(
    ("given", "accumulated"),
    [({"tokens_per_step": 256}, 4), ({"gradient_accumulation_steps": 3, "tokens_per_step": 7}, 3)],
)
def test_tokens_per_step(options, tmp_path, capsys, given, accumulated):
    """Gradient accumulation follows from --tokens_per_step unless given: otherwise steps would be of another size than
    reported.
    """
    train.main(options(max_steps=1, **given))
    arguments = torch.load(tmp_path / "out" / "training_args.bin", weights_only=False)
    assert arguments.gradient_accumulation_steps == accumulated
    assert f"steps: 1 of {accumulated * 2 * 32} tokens" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "run.json").read_text())["tokens_seen"] == accumulated * 2 * 32


def test_paper_defaults(options):
    """Defaults are the paper's learning rate, weight decay, schedule, optimizer and tokens per step: otherwise a plain
    command would not train as the paper does.
    """
    parser = train.HfArgumentParser(train.ARGUMENTS)
    *_, arguments = parser.parse_args_into_dataclasses(options(learning_rate=None))
    assert (arguments.learning_rate, arguments.weight_decay, arguments.lr_scheduler_type) == (4e-4, 0.1, "cosine")
    assert arguments.optim.startswith("adamw")
    assert parser.get_default("tokens_per_step") == 524288


def test_overrides_rebuild_the_config(options):
    """Sizes derived from an overridden field follow it: otherwise head_dim would keep its old value."""
    config = LLAMA | {"hidden_size": 64}
    path = options(config)[1]
    arguments = ModelArguments(config=path, config_overrides="hidden_size=32,tie_word_embeddings=true")
    changed = load_config(arguments, load_tokenizer("bytes"))
    assert (changed.hidden_size, changed.head_dim, changed.tie_word_embeddings) == (32, 16, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_data": "/no/such/folder"}, "/no/such/folder is neither a file, nor a folder, nor a data set"),
        ({"eval_data": "/no/such/file.txt"}, "/no/such/file.txt is neither"),
        ({"train_data": "no-such/data"}, "no-such/data is neither"),
        ({"config": "/no/such/config.json"}, "/no/such/config.json: no such file"),
        ({"block_length": 1}, "block_length 1"),
        ({"block_length": 4096, "tokens_per_step": 8192}, "give --eval_data"),
        ({"tokens_per_step": 100}, "try --tokens_per_step 128"),
        ({"text_column": "body"}, "no --text_column body, nor a prompt and a completion, only text"),
        (
            {"config_overrides": "vocab_size=100"},
            "has 259 tokens, more than the vocab_size 100: give --config_overrides vocab_size=259",
        ),
        ({"config_overrides": "hiden_size=64"}, "llama has no hiden_size"),
        ({"resume_from_checkpoint": "true"}, "no complete checkpoint in"),
        ({"resume_from_checkpoint": "/no/such/checkpoint"}, "no checkpoint in /no/such/checkpoint"),
    ],
)
def test_bad_inputs_are_named(options, tmp_path, changes, message):
    """Wrong options raise an error that names them before any file is written: otherwise a run would fail after
    hours.
    """
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train.main(options(**changes))
    assert not (tmp_path / "out").exists()


def test_folder_without_text_is_named(options, tmp_path):
    """A folder without text raises an error that names it: otherwise training would fail without a cause."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"--train_data .*empty holds no \.txt or \.md or .*files"):
        train.main(options(train_data=tmp_path / "empty"))
    (tmp_path / "empty" / "empty.txt").touch()
    with pytest.raises(ValueError, match="holds no text"):
        train.main(options(train_data=tmp_path / "empty"))


def test_tokenizer_without_eos_is_named(options, tmp_path):
    """A tokenizer without eos raises an error: otherwise documents would not be separated."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="no eos token"):
        train.main(options(tokenizer=tmp_path / "tokenizer"))


def test_checkpoints_are_not_trained_over(options, tmp_path):
    """An output folder with checkpoints raises an error unless resumed: otherwise a run would overwrite another."""
    (tmp_path / "out" / "checkpoint-4").mkdir(parents=True)
    with pytest.raises(ValueError, match="pass --resume_from_checkpoint true"):
        train.main(options())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="processes find each other where there is a GPU")
def test_processes_that_know_nothing_of_each_other_are_refused(options, tmp_path):
    """Processes without a common group raise an error: otherwise each would train alone and overwrite the other's
    files.
    """
    run = subprocess.run([*LAUNCH, *options(use_cpu=None)], capture_output=True, text=True, timeout=240)
    assert run.returncode and "2 processes were started, but each would train by itself" in run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_train_like_one(options, tmp_path, texts, monkeypatch):
    """Two processes give the loss of one and report once: otherwise distributed training would be another training."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = train.main(options(output_dir=tmp_path / "alone", eval_data=texts))
    command = [*LAUNCH, *options(per_device_train_batch_size=1, per_device_eval_batch_size=4, eval_data=texts)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout
    assert output.count("eval_perplexity         =") == 1
    assert output.count("model: llama") == 1
    assert (tmp_path / "out" / "checkpoint-8" / "rng_state_1.pth").exists()  # the second process was there
    together = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert together["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-4)

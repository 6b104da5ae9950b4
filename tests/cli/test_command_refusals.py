"""Bad input to a command ends in one line that names the command and the argument, before anything is written."""

import json
import re
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
from byte_model import save_byte_model
from covering import in_one_test
from tiny_run import LLAMA

import titans_hf_console as console
from titans_hf.cli.training.tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: a model, an adapter, texts and a table, most of which cannot be used."""
    monkeypatch.chdir(tmp_path)
    save_byte_model(Path("model"), "mag")
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained("without-eos")
    Path("tiny.json").write_text(json.dumps(LLAMA))
    texts = {"a": b"Es war einmal. " * 99, "bad": b"caf\xe9 au lait", "torn": b"caf\xc3", "empty": b""}
    for name, content in texts.items():
        Path(f"{name}.txt").write_bytes(content)
    for name in ("no-files", "adapter", "mixed", "run/checkpoint-4", "run-1", "run-2", "run-3"):
        Path(name).mkdir(parents=True)
    for name in ("run-1/run.json", "run-2/model.safetensors", "run-3/adapter_model.bin"):
        Path(name).touch()
    rows = {"mixed/a": {"text": "a"}, "numbers": {"text": 5}, "chats": {"messages": [{"role": "user"}]}}
    for name, row in rows.items():
        Path(f"{name}.jsonl").write_text(json.dumps(row))
    Path("mixed/b.txt").write_text("b")
    Path("adapter/adapter_config.json").write_text("{}")
    dates = pd.date_range("2020", periods=100, freq="h")
    pd.DataFrame({"date": dates, "c0": 0.5, "c1": 1.0}).to_csv("data.csv", index=False)
    return tmp_path


TUNE = "train --train_data a.txt --output_dir out --use_cpu true"
TRAIN = f"{TUNE} --tokenizer bytes --config tiny.json --block_length 32"
START = "give either --config and --tokenizer, .*, or --model_name_or_path"
INPUTS = {
    f"{TRAIN} --train_data no/such/folder": "no/such/folder is neither a file, nor a folder, nor a data set",
    f"{TRAIN} --train_data no-files": r"--train_data no-files holds no \.txt or \.md or .*files",
    f"{TRAIN} --train_data empty.txt": "--train_data empty.txt holds no text",
    f"{TRAIN} --train_data mixed": r"--train_data mixed holds files of several kinds \(\.jsonl, \.txt\)",
    f"{TRAIN} --train_data numbers.jsonl": "no text in a --text_column text, but {'text': 'int64'}",
    f"{TRAIN} --train_data chats.jsonl": "{'messages': 'lists'}; `trl sft` trains on conversations",
    f"{TRAIN} --eval_data no-such/data": "no-such/data is neither",
    f"{TRAIN} --config tiny-mga": "--config tiny-mga is not a checkpoint: no such folder, .*; configurations by name: ",
    f"{TRAIN} --config a.txt": "--config a.txt is not a checkpoint: its configuration does not load",
    f"{TRAIN} --block_length 1": "--block_length must be at least 2, but is 1",
    f"{TRAIN} --block_length 4096": "give --eval_data",
    f"{TRAIN} --config_overrides vocab_size=100": "259 tokens, more than the vocab_size 100: .* vocab_size=259",
    f"{TRAIN} --config_overrides hiden_size=64": "llama has no hiden_size",
    f"{TRAIN} --config tiny-mag --variant lmm --memory_depth=1": "--config_overrides variant=lmm,memory_depth=1$",
    f"{TRAIN} --config_overrides head_dim=8 --hidden_size 64": "--config_overrides head_dim=8,hidden_size=64$",
    f"{TRAIN} --variant lmm": "there is no option --variant lmm",
    f"{TRAIN} --num_parameters 999": "--num_parameters must be at least .*, but is 999",
    f"{TUNE} --model_name_or_path model --num_parameters 999": "--num_parameters is the size of a new model",
    f"{TRAIN} --config_overrides hidden_size": "--config_overrides hidden_size: .*int",
    f"{TRAIN} --config_overrides use_cache=maybe": "--config_overrides use_cache=maybe: .*bool",
    f"{TRAIN} --resume_from_checkpoint true": "true: no complete checkpoint",
    f"{TRAIN} --resume_from_checkpoint no/such": "no/such: no complete checkpoint",
    f"{TRAIN} --output_dir run": "run holds checkpoints: pass --resume_from_checkpoint true",
    f"{TRAIN} --output_dir run-1": r"run-1 holds a trained model \(run.json\): give another --output_dir",
    f"{TRAIN} --output_dir run-2": r"run-2 holds a trained model \(model.safetensors\)",
    f"{TRAIN} --output_dir run-3": r"run-3 holds a trained model \(adapter_model.bin\)",
    f"{TRAIN} --train_only memory": "--train_only memory: this model has no memory",
    f"{TRAIN} --streaming true --max_steps 2": "no text beside the held-out documents: give --eval_data",
    f"{TRAIN} --streaming true --eval_data a.txt": "max_steps has to be specified",
    f"{TRAIN} --model_name_or_path x": START,
    TUNE: START,
    f"{TUNE} --config tiny.json": START,
    f"{TUNE} --model_name_or_path no-model": "--model_name_or_path no-model has no tokenizer: no such folder",
    f"{TRAIN} --tokens_per_step -128": "--tokens_per_step must be at least 1, but is -128",
    f"{TRAIN} --gradient_accumulation_steps 0": "--gradient_accumulation_steps must be at least 1, but is 0",
    f"{TRAIN} --per_device_train_batch_size 0": "--per_device_train_batch_size must be at least 1, but is 0",
    f"{TRAIN} --max_eval_blocks -3": "--max_eval_blocks must be at least 1, but is -3",
    f"{TRAIN} --tokenizer without-eos": "no eos token",
    f"{TRAIN} --tokenizer no-tokenizer": "--tokenizer no-tokenizer has no tokenizer: no such folder",
    "merge model merged": "ADAPTER model is not an adapter's folder",
    "merge adapter model": "OUTPUT model exists",
    "read model bad.txt --memory m": "TEXT bad.txt is not UTF-8",
    "read model torn.txt --memory m": "TEXT torn.txt is not UTF-8",
    "read model empty.txt --memory m": "TEXT empty.txt holds no text",
    "read model '' --memory m": "TEXT is empty",
    "read model no-text --memory m": "TEXT no-text does not exist",
    "read model no-files --memory m": "TEXT no-files holds no .txt or .md files",
    "read model a.txt --memory m --piece 0": "--piece must be at least 1, but is 0",
    "read model a.txt --memory bad.txt/new/m": "--memory bad.txt/new/m cannot be a folder: bad.txt is a file",
    "ask no-model --memory m --prompt X": "m is not a memory folder",  # before a model is loaded
    "ask no-model --memory m --prompt ''": "--prompt is empty",
    "ask no-model --memory m --max_new_tokens 0": "--max_new_tokens must be at least 1, but is 0",
    "ask no-model --memory m --temperature -1": "--temperature must be at least 0, but is -1",
    "ask no-model --memory m --temperature nan": "--temperature must be at least 0, but is nan",
    "ask no-model --memory m --seed -1": "--seed must be at least 0, but is -1",
    f"ask no-model --memory m --seed {2**64}": "--seed must be less than 2\\^63",
    "surprise model no-text --output out": "No such file or directory: 'no-text'",
    "surprise model bad.txt --output out": "TEXT bad.txt is not UTF-8",
    "surprise model a.txt --output out --max_tokens -1": "--max_tokens must be at least 1, but is -1",
    "surprise model a.txt --output bad.txt": "--output bad.txt cannot be a folder: bad.txt is a file",
    "surprise model a.txt --output out --max_tokens 5": r"TEXT a.txt has \d+ tokens; it may have 1 to 5",
    "serve model --continuous-batching": "--continuous-batching",
    "serve --memory m": "--memory m needs MODEL",
    "serve model --memory m --compile": "--memory m cannot be used with --compile",
    "serve model --memory m": "m is not a memory folder",  # when it starts
    "trian": "there is no command trian, only train, ",
}


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "cache" not in path.parts}


@in_one_test("command,message", INPUTS.items())
def test_bad_input(command, message, folder, monkeypatch, capsys):
    """The last line names the command, the argument and what it may be; no file is new."""
    name, *arguments = shlex.split(command)
    before = files_in(folder)
    monkeypatch.setattr(sys, "argv", ["titans-hf", name, *arguments])
    with pytest.raises(SystemExit) as ended:
        console.main()
    text = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in text and text.count("error: ") == 1
    assert re.match(rf"titans-hf( {name})?: error: .*{message}", text.splitlines()[-1]), text
    assert "StrictDataclass" not in text and files_in(folder) == before

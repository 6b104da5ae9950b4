"""titans-hf ask: answers are those of a model that has just read, and asking leaves the memory unchanged."""

import pytest
import torch
from covering import in_one_test
from reading_runs import SPECIAL, flags, ids_of, load, run_read, whole_text

from titans_hf.cache_files import read_description
from titans_hf.cli import ask
from titans_hf.cli.training.tokenizer import byte_tokenizer


def run_ask(paths, *prompts, **changes) -> None:
    options = dict(memory=paths.memory, max_new_tokens=9) | changes
    ask.main([paths.model, *(f"--prompt={x}" for x in prompts), *flags(**options)])


def continuation(paths, text: str) -> str:
    """Returns the greedy continuation of a text that is read in one call."""
    ids = ids_of(text)
    tokens = paths.net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    return byte_tokenizer().decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_a_model_that_has_just_read(paths, capsys):
    """Answers equal those after reading text and prompt in one call, and leave the files unchanged."""
    run_read(paths, paths.texts)
    before = {path.name: path.read_bytes() for path in paths.memory.iterdir()}
    prompts = ["Der König", "Zwölf Töchter hatte der", "X"]
    run_ask(paths, *prompts)
    answers = "".join(f"{prompt}{continuation(paths, whole_text(paths) + prompt)}\n" for prompt in prompts)
    assert capsys.readouterr().out == answers
    assert {path.name: path.read_bytes() for path in paths.memory.iterdir()} == before


def test_special_tokens_in_a_prompt_are_text(paths, capsys):
    """`</s>` in a prompt is text, with --keep too."""
    run_read(paths, paths.texts / "a.txt")
    text = (paths.texts / "a.txt").read_text()
    run_ask(paths, SPECIAL, keep=True)
    answer = continuation(paths, text + SPECIAL)
    assert capsys.readouterr().out == f"{SPECIAL}{answer}\n"
    assert read_description(paths.memory)["tokens_seen"] == [len(ids_of(text + SPECIAL + answer)[0])]


def test_what_is_kept_is_learnt(paths, capsys):
    """--keep saves each prompt and its answer in order, in the memory."""
    run_read(paths, paths.texts)
    run_ask(paths, "Der König", "Zwölf", keep=True)
    text = whole_text(paths)
    for prompt in ("Der König", "Zwölf"):
        text += prompt + continuation(paths, whole_text(paths) + prompt)
    assert load(paths).num_tokens_seen.item() == len(ids_of(text)[0])
    run_ask(paths, "X")
    assert capsys.readouterr().out.endswith("X" + continuation(paths, text + "X") + "\n")
    run_read(paths, paths.texts)  # and is known to have read its texts


def test_asking_again_and_again(paths, capsys, monkeypatch):
    """Interactive prompts are answered independently."""
    run_read(paths, paths.texts / "a.txt")
    prompts = iter(["Der König", "Zwölf", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(prompts))
    run_ask(paths)
    text = (paths.texts / "a.txt").read_text()
    answers = [continuation(paths, text + prompt) for prompt in ("Der König", "Zwölf")]
    assert capsys.readouterr().out == "".join(f"{x}\n" for x in answers)


def test_questions_share_the_memory(paths):
    """Repeating a loaded memory for 100 questions allocates no copies."""
    run_read(paths, paths.texts / "a.txt")
    cache = load(paths)
    cache.batch_repeat_interleave(100)
    for layer in cache.layers:
        for x in layer.state.tensors():
            assert (
                len(x) == 100
                and x.untyped_storage().nbytes() <= next(paths.memory.glob("*.safetensors")).stat().st_size
            )


@in_one_test(
    "options", [{"max_new_tokens": 0}, {"temperature": -1}, {"temperature": "nan"}, {"seed": -1}, {"seed": 2**64}]
)
def test_bad_input_to_ask(options, paths):
    """Options out of range, an empty prompt and a missing memory raise an error that names them."""
    with pytest.raises(ValueError, match=f"--{next(iter(options))}"):
        run_ask(paths, "X", **options)
    with pytest.raises(ValueError, match="--prompt is empty"):
        run_ask(paths, "")
    with pytest.raises(FileNotFoundError, match="is not a memory folder"):
        run_ask(paths, "X")

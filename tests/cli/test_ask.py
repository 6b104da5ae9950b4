"""titans-hf ask: answers are those of a model that has just read, and asking leaves the memory unchanged."""

import pytest
import torch
from reading_runs import SPECIAL, flags, ids_of, load, run_read, whole_text
from transformers import GenerationConfig
from vocabularies import sentencepiece, wordpiece

from titans_hf import TitansForCausalLM
from titans_hf.cache_files import read_description
from titans_hf.cli import ask
from titans_hf.cli.shared.text_ids import decode_answer, encode
from titans_hf.cli.training.tokenizer import byte_tokenizer
from titans_hf.memory_state import tensors_of


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


def test_what_is_kept_is_learnt(paths, capsys):
    """--keep saves each prompt and its answer in order, in the memory. `</s>` in a prompt is text."""
    run_read(paths, paths.texts)
    run_ask(paths, SPECIAL, "Zwölf", keep=True)
    text = whole_text(paths)
    for prompt in (SPECIAL, "Zwölf"):
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


def test_an_answer_of_a_sentencepiece_vocabulary(paths, capsys, monkeypatch):
    """The space before an answer's first word is printed, and kept: an answer is decoded together with its prompt."""
    tokenizer = sentencepiece()
    tokenizer.save_pretrained(paths.model)
    ids = encode(tokenizer, "the key was red").input_ids
    made = torch.tensor([[*ids, tokenizer.eos_token_id]])
    (paths.texts / "a.txt").write_text("the door was open.")
    run_read(paths, paths.texts / "a.txt")
    monkeypatch.setattr(TitansForCausalLM, "generate", lambda *args, **kwargs: made)
    run_ask(paths, "the key was", keep=True)
    assert capsys.readouterr().out == "the key was red\n"
    num_read = len(encode(tokenizer, "the door was open.").input_ids)
    assert read_description(paths.memory)["tokens_seen"] == [num_read + len(ids)]


@pytest.mark.parametrize("make", [sentencepiece, wordpiece, byte_tokenizer])
def test_an_answer_is_what_it_adds_to_its_prompt(make):
    """Prompt and answer together are the decoded text, with the space between two words."""
    tokenizer = make()
    for text in ("the key was red and (a small one)", "the captain's lamp, and red door open"):
        ids = encode(tokenizer, text).input_ids
        for cut in range(1, len(ids)):
            found = decode_answer(tokenizer, ids[:cut], [*ids[cut:], tokenizer.eos_token_id])
            assert tokenizer.decode(ids[:cut]) + found == tokenizer.decode(ids)
            assert found.replace(" ", "") == tokenizer.decode(ids[cut:]).replace(" ", "").removeprefix("##")


def test_every_end_token_of_the_checkpoint_ends_an_answer(paths, capsys):
    """An answer ends at each of the tokens of generation_config.json, where it has others than the tokenizer's one."""
    run_read(paths, paths.texts / "a.txt")
    text = continuation(paths, (paths.texts / "a.txt").read_text() + "X")
    first, end = byte_tokenizer()(text[:1]).input_ids[0], byte_tokenizer()(text[1:2]).input_ids[0]
    assert first != end
    config = GenerationConfig.from_pretrained(paths.model)
    config.eos_token_id = [1, end]
    config.save_pretrained(paths.model)
    run_ask(paths, "X", "Zwölf")
    assert capsys.readouterr().out.startswith(f"X{text[:1]}\nZwölf")


def test_a_prompt_after_another_process_has_read_on(paths, monkeypatch):
    """Between two prompts of --keep another process may read on: its memory is the one that is kept."""
    a, b = paths.texts / "a.txt", paths.texts / "b.txt"
    run_read(paths, a)

    def prompts():
        yield "Der König"
        run_read(paths, b, append=True)
        numbers.append(load(paths).num_tokens_seen.item())
        yield "Zwölf"
        yield ""

    numbers, asked = [], prompts()
    monkeypatch.setattr("builtins.input", lambda _: next(asked))
    run_ask(paths, keep=True)
    assert load(paths).num_tokens_seen.item() > numbers[0] > len(a.read_bytes()) + len(b.read_bytes())


def test_questions_share_the_memory(paths):
    """A loaded memory is not copied for each of 100 questions."""
    run_read(paths, paths.texts / "a.txt")
    cache, size = load(paths), next(paths.memory.glob("*.safetensors")).stat().st_size
    cache.batch_repeat_interleave(100)
    parts = [x for layer in cache.layers for x in tensors_of(layer.state)]
    assert all(len(x) == 100 and x.untyped_storage().nbytes() <= size for x in parts)

"""eval/streaming: readers see no token of the future, facts are new, and records become tables."""

import json
import os
import re
import string
import subprocess
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from eval_common import BOOK
from remember_models import small_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.streaming import chat, facts, readers, ruler, tasks
from eval.streaming.__main__ import main
from titans_hf import Passages
from titans_hf.cli.training.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
WINDOW = 100
STORIES = {  # facts, a question, its answer
    "qa1": (["Mary went to the hall"], "Where is Mary?", "hall"),
    "qa2": (["Mary got the milk", "Mary went to the hall"], "Where is the milk?", "hall"),
    "qa3": (["Mary got the milk", "Mary went to the hall", "Mary went to the den"],
            "Where was the milk before the den?", "hall"),
}  # fmt: skip
READERS = {
    "full": readers.Reader,
    "window": lambda model: readers.Remember(model, WINDOW, None),
    "search": lambda model: readers.Search(model, WINDOW),
    "passages": lambda model: readers.Remember(model, WINDOW, Passages()),
    "pasted": lambda model: readers.Pasted(model, WINDOW),
}


def tiny_model(vocabulary: int = 60):
    return small_model(vocab_size=vocabulary).float()


@pytest.mark.parametrize("name", READERS)
def test_a_branch_leaves_nothing(name):
    """What a reader says after a text does not depend on what it has said in branches, nor on a text before."""
    ids = torch.randint(60, (480,), generator=torch.Generator().manual_seed(1))
    reader, said = READERS[name](tiny_model()), []
    for other in (ids[:70], ids[:0]):
        reader.begin()
        reader.read_on(ids[:400])
        if len(other):
            reader.after(other)
        said.append(reader.after(ids[400:]))
        if len(other):
            reader.generate(other, 5)
    torch.testing.assert_close(*said, atol=1e-5, rtol=0)
    if name in ("full", "window", "search"):
        torch.testing.assert_close(reader.read(ids[400:]), said[1], atol=1e-4, rtol=0)
        torch.testing.assert_close(said[1].exp().sum(1), torch.ones(80))


def test_what_is_searched_or_pasted_is_found():
    """The longest match says the next token of a text that is repeated; the passage that holds the query's words is
    pasted in front of the last tokens of a window."""
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    search, pasted = (readers.Search(tiny_model(1000), WINDOW), readers.Pasted(tiny_model(1000), 200))
    for reader in (search, pasted):
        reader.begin()
        reader.read_on(ids)
    assert search.after(ids[300:320]).argmax(1)[1:].tolist() == ids[302:321].tolist()
    prompt = pasted.prompt(torch.cat([ids, ids[300:320]]), 0).tolist()
    assert len(prompt) == 200 and prompt[-20:] == ids[300:320].tolist()
    assert str(ids[295:330].tolist())[1:-1] in str(prompt) and prompt[0] == pasted.first


def test_facts_occur_in_no_other_file():
    """No value, person or sentence of a fact is in any other file of the project: no fit can have seen it."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    own = ("eval/results/streaming", "eval/streaming/facts")
    paths = [ROOT / name for name in files.split("\0") if name and not name.startswith(own)]
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace").lower() for path in paths if path.is_file())
    words = [word.lower() for word in (*facts.WHO, *chain.from_iterable(facts.VALUES.values()))]
    sentences = [re.split(r"\{who\} ?", x)[-1].lower() for fact in facts.SENTENCES for x in fact[1:]]
    assert len(paths) > 200 and len(set(words)) == len(words)
    assert set(words) & set(re.findall(r"[a-z]+", text)) == set()
    assert [x for x in sentences if len(x.split()) > 3 and x in text] == []
    for _, told, cloze in facts.SENTENCES:
        assert len(set(told.lower().split()) & set(cloze.lower().split())) <= 2


def test_every_question_has_its_answer():
    """What is asked was told before the filler: once, of two persons, or twice, where the last counts; or never. The
    answer that was told is right, and that to an absent fact is wrong where it begins as a told one."""
    tokenizer = byte_tokenizer()
    for seed in range(30):
        ids, answers = facts.make_text("It rained.", tokenizer, str(seed))
        told, asked = tokenizer.decode(ids).split("It rained.")
        assert Counter(x.kind for x in answers) == dict.fromkeys(("begun", "cloze", "pair", "updated", "absent"), 4)
        for kind, first, begin, end, value, values in answers:
            question = tokenizer.decode(ids[first:begin])
            assert tokenizer.decode(ids[begin:end]) == f" {value}" and question in asked and told.count(value) == 1
            lines = [x for x in re.split(r"(?<=\.) ", told.strip()) if x.startswith(question)]
            assert len(lines) == {"begun": 1, "pair": 1, "cloze": 0, "updated": 2, "absent": 0}[kind]
            assert kind in ("cloze", "absent") or lines[-1] == f"{question} {value}."
            if kind == "pair":
                last = question.split()[-1]
                assert sum(f" {last} " in x for x in told.split(".")) >= 2
            tops = {i - 1: int(ids[i]) for i in range(begin, end)}
            answer = facts.Answer(kind, first, begin, end, value, values)
            assert facts.judge(answer, ids, tops, tokenizer) == (value if kind != "absent" else " ", kind != "absent")


@pytest.fixture(scope="module")
def tokenizer():
    """A vocabulary of words, with a chat template."""
    texts = [BOOK, string.ascii_letters, *chain.from_iterable(chat.CHATS)]
    result = byte_tokenizer().train_new_from_iterator(texts * 3, 900, show_progress=False)
    result.chat_template = (
        "{% for x in messages %}<{{ x.role }}>\n{{ x.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    )
    return result


@pytest.mark.parametrize("kind", ruler.KINDS)
def test_needles_can_be_found(kind, tokenizer):
    """What an answer must contain is what a program finds in the prompt, which has the length that was asked for."""
    parts = ruler.make_prompts(tokenizer, 4, [BOOK, "Another text. It goes on. " * 200], 0, kind, 2048)
    assert len(parts) == 4 == len({prompt for prompt, _ in parts})
    for prompt, ((_, end, wanted, _, generated),) in parts:
        assert 400 < len(tokenizer(prompt).input_ids) + generated <= 2048
        found = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", prompt)
        assert sorted(value for key, value in found if key in end) == sorted(wanted)
        assert len(found) == (1 if "single" in kind else 4)
        assert ruler.score("no", wanted) == 0 and ruler.score(" ".join(wanted).upper(), wanted) == 1


def test_chats_lie_within_the_window_or_behind_a_text(tokenizer):
    """Twelve conversations of five turns; of full attention, own answers are those of the model called with the whole
    conversation, and the log probabilities of given answers too."""
    assert len(chat.CHATS) == 12 and {len(x) for x in chat.CHATS} == {10}
    model = tiny_model(len(tokenizer))
    for number in (0, 11):
        found = chat.answers(readers.Reader(model), number, "It rained.", tokenizer)
        before, lines = chat.turns(number, "It rained.")
        assert bool(before) == (number == 11) and [x[0] for x in found] == ["new"] * 5 + ["given"] * 5
        said = []
        for turn, (new, given) in enumerate(zip(found[:5], found[5:], strict=True)):
            for earlier, is_own in ((said, True), (lines[1::2], False)):
                texts = [*before, *(x for i in range(turn) for x in (lines[2 * i], earlier[i])), lines[2 * turn]]
                messages = [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(texts)]
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                ids = tokenizer(text, return_tensors="pt").input_ids
                if is_own and not turn:
                    made = model.generate(ids, max_new_tokens=chat.MOST, do_sample=False)[0, ids.shape[1] :]
                    assert new[2] == tokenizer.decode(made, skip_special_tokens=True)
                if not is_own:
                    wanted = tokenizer(lines[2 * turn + 1], return_tensors="pt").input_ids
                    logits = model(torch.cat([ids, wanted], 1)).logits[0, ids.shape[1] - 1 : -1]
                    assert abs(-cross_entropy(logits, wanted[0]).item() - given[4]) < 0.02
            assert new[3] == (new[2].strip() not in [x.strip() for x in said])
            said.append(new[2])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_passages_do_not_let_a_chat_repeat_itself():
    """A pretrained model in twelve conversations, of which half follow a text: at most one more of its 60 answers
    equals an earlier one than with full attention. TITANS_TEST_MODEL is another folder or name."""
    name, repeated = os.environ.get("TITANS_TEST_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct"), []
    try:
        model, words = (x.from_pretrained(name, local_files_only=True) for x in (AutoModelForCausalLM, AutoTokenizer))
    except OSError:
        pytest.skip(f"{name} is not on this machine")
    for reader in (make(model) for make in (READERS["full"], lambda x: readers.Remember(x, 256, ("passages",)))):
        found = [x for i in range(12) for x in chat.answers(reader, i, BOOK[:4400], words)]
        repeated.append(sum(x[0] == "new" and not x[3] for x in found))
    assert repeated[1] <= repeated[0] + 1, repeated


@pytest.mark.parametrize("task", ["loss", "facts", "ruler", "babilong", "chat", "told"])
def test_runs_become_lines_and_tables(task, tokenizer, tmp_path, capsys):
    """A command writes a line for each text and method, leaves out those that are there, and prints the tables; what
    full attention says is what the model says alone."""
    model = tiny_model(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text(f"{name} {BOOK}" * 2)
    (tmp_path / "stories").mkdir()
    for kind, (story, question, place) in STORIES.items():
        lines = [f"1 {x}." for x in story] + [f"2 {question} \t{place}\t1"]
        text = "\n".join(lines + [x.replace(place, "attic") for x in lines])
        (tmp_path / "stories" / f"{kind}_x_test.txt").write_text(text)
    output = ["--output", str(tmp_path / "runs.jsonl")]
    lengths = {"facts": ["100", "300"], "ruler": ["1500"], "babilong": ["0", "300"]}.get(task, [])
    methods = ["window", "full", "pasted", "passages"][: 2 if task == "loss" else 4]
    command = [str(tmp_path / "model"), "--task", task, "--methods", *methods, "--window=100", "--number=2",
               "--tokens=520", "--kinds", "niah_single_2", "--text", str(tmp_path / "texts"), "--place=0", *output,
               "--stories", str(tmp_path / "stories"), *(["--lengths", *lengths] if lengths else [])]  # fmt: skip
    main(command)
    records = [json.loads(x) for x in (tmp_path / "runs.jsonl").read_text().splitlines()]
    texts = {"loss": 2, "facts": 2, "ruler": 1, "babilong": 6, "chat": 12, "told": 2}[task]
    assert len(records) == texts * len(methods) and all(x["bytes"] > 0 for x in records)
    of_full = [x for x in records if x["run"]["method"] == "full"]
    for record in of_full if task == "loss" else ():
        text = (tmp_path / "texts" / record["run"]["text"]).read_text()
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :520]
        losses = cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        means = [x.mean().item() for x in losses.split(tasks.PER_BLOCK)]
        np.testing.assert_allclose(record["result"]["losses"], means, atol=1e-3)
    main(command)
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == len(records)
    capsys.readouterr()
    main([*output, *(["--plot", str(tmp_path / "plot.png")] if task in ("loss", "facts") else [])])
    printed = capsys.readouterr().out
    assert f"## {'' if task == 'loss' else task + ', '}texts, window 100" in printed
    if task not in ("loss", "babilong"):
        answers = [y for x in of_full for y in x["result"]["answers"]]
        answers = [x for x in answers if x[0] == answers[0][0]]
        assert f"{sum(x[3] for x in answers):.3g} of {len(answers)}" in printed
    with pytest.raises(SystemExit):
        main([*command, "--methods", "wndow"])

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
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from eval.streaming import chat, facts, readers, ruler
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
    "retrieved": lambda model: readers.RetrievedPassages(model, numbers(60)),
    "bm25": lambda model: readers.RetrievedSentences(model, numbers(60), 2),
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
        reader.start_prompt()
        if len(other):
            reader.after(other)
        said.append(reader.after(ids[400:]))
        if len(other):
            reader.generate(other, 5)
    torch.testing.assert_close(*said, atol=1e-5, rtol=0)
    if name in ("full", "window", "search"):
        torch.testing.assert_close(reader.read(ids[400:]), said[1], atol=1e-4, rtol=0)
        torch.testing.assert_close(said[1].exp().sum(1), torch.ones(80))


def numbers(vocabulary: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer that writes a token as its number."""
    model = WordLevel({str(i): i for i in range(vocabulary)})
    result = Tokenizer(model)
    result.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=result)


def test_what_is_searched_is_found():
    """The longest match says the next token of a text that is repeated."""
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    search = readers.Search(tiny_model(1000), WINDOW)
    search.begin()
    search.read_on(ids)
    assert search.after(ids[300:320]).argmax(1)[1:].tolist() == ids[302:321].tolist()


@pytest.mark.parametrize("at", [0, 300, 960])
def test_plain_retrieval_reads_what_it_finds_and_the_question_alone(at):
    """The passage that holds the question's words, from the whole text, and the question: nothing between them, and
    nothing after the question. What is answered is what the model answers to that."""
    ids, words, model = (
        torch.randperm(1000, generator=torch.Generator().manual_seed(1)),
        numbers(1000),
        tiny_model(1000),
    )
    reader = readers.RetrievedPassages(model, words)
    reader.begin()
    reader.read_on(ids)
    reader.start_prompt()
    prompt = reader.prompt(ids[at : at + 20])
    assert prompt[-20:].tolist() == ids[at : at + 20].tolist()
    assert str(ids[at : at + 40].tolist())[1:-1] in str(prompt[:-20].tolist())
    assert prompt[:-20].tolist() == ids[(start := ids.tolist().index(prompt[0])) :][: len(prompt) - 20].tolist()
    p = reader.passages
    assert start <= at and len(prompt) - 20 <= sum((p.before, 2 * p.block, p.after))
    log_p = reader.after(torch.cat([ids[at : at + 1], ids[:5]]))
    alone = torch.cat([reader.prompt(ids[at : at + 1]), ids[:5]])
    torch.testing.assert_close(log_p, model(alone[None]).logits[0, -6:].log_softmax(-1), atol=1e-5, rtol=0)


def test_plain_retrieval_finds_sentences_by_bm25(tokenizer):
    """The best sentences stand in the order of the text, in a message of the user in a chat; the scores are those of
    the formula."""
    text = "Ada lives in Rome. Ben lives in Oslo.\nIt rained. It rained again. Ben has a dog. Cleo lives in Lima. "
    reader = readers.RetrievedSentences(tiny_model(len(tokenizer)), tokenizer, 2)
    reader.begin()
    ids, question = (torch.tensor(tokenizer(x).input_ids) for x in (text, "Where does Ben, with the dog, live?"))
    assert reader.find(ids, question) == "Ben lives in Oslo. Ben has a dog."
    idf, length = {"ben": np.log(1 + 4.5 / 2.5), "dog": np.log(1 + 5.5 / 1.5)}, {"oslo": 4, "dog": 4}
    mean = (4 + 4 + 2 + 3 + 4 + 4) / 6
    part = 2.2 / (1 + 1.2 * (0.25 + 0.75 * length["oslo"] / mean))
    scores = reader.scores(["Ada lives in Rome", "Ben lives in Oslo", "It rained", "It rained again", "Ben has a dog",
                            "Cleo lives in Lima"], "Where does Ben, with the dog, live?")  # fmt: skip
    np.testing.assert_allclose(scores, [0, idf["ben"] * part, 0, 0, (idf["ben"] + idf["dog"]) * part, 0])
    reader.read_on(ids)
    reader.start_prompt("Where is Ben?")
    written = tokenizer.decode(reader.prompt(torch.tensor(tokenizer("<user>\nWhere is Ben?").input_ids)))
    assert written == "<user>\nBen lives in Oslo. Ben has a dog.\n\nWhere is Ben?\n<assistant>\n"


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
        for kind, start, begin, end, value, values in answers:
            question = tokenizer.decode(ids[start:begin])
            assert re.split(r"\. |\n\n", tokenizer.decode(ids[:begin]))[-1] == question
            assert tokenizer.decode(ids[begin:end]) == f" {value}" and question in asked and told.count(value) == 1
            lines = [x for x in re.split(r"(?<=\.) ", told.strip()) if x.startswith(question)]
            assert len(lines) == {"begun": 1, "pair": 1, "cloze": 0, "updated": 2, "absent": 0}[kind]
            assert kind in ("cloze", "absent") or lines[-1] == f"{question} {value}."
            if kind == "pair":
                last = question.split()[-1]
                assert sum(f" {last} " in x for x in told.split(".")) >= 2
            tops = {i - 1: int(ids[i]) for i in range(begin, end)}
            answer = facts.Answer(kind, start, begin, end, value, values)
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
    for reader in (make(model) for make in (READERS["full"], lambda x: readers.Remember(x, 256, Passages()))):
        found = [x for i in range(12) for x in chat.answers(reader, i, BOOK[:4400], words)]
        repeated.append(sum(x[0] == "new" and not x[3] for x in found))
    assert repeated[1] <= repeated[0] + 1, repeated


@pytest.mark.parametrize("task", ["facts", "ruler", "babilong", "chat", "told"])
def test_runs_become_lines_and_tables(task, tokenizer, tmp_path, capsys):
    """A command writes a line for each text and method, leaves out those that are there, and prints the tables."""
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
    methods = ["window", "full", "retrieved", "bm25", "passages"]
    command = [str(tmp_path / "model"), "--task", task, "--methods", *methods, "--window=100", "--number=2",
               "--kinds", "niah_single_2", "--text", str(tmp_path / "texts"), "--place=0", *output,
               "--stories", str(tmp_path / "stories"), *(["--lengths", *lengths] if lengths else [])]  # fmt: skip
    main(command)
    records = [json.loads(x) for x in (tmp_path / "runs.jsonl").read_text().splitlines()]
    texts = {"facts": 2, "ruler": 1, "babilong": 6, "chat": 12, "told": 2}[task]
    assert len(records) == texts * len(methods) and all(x["bytes"] > 0 for x in records)
    of_full = [x for x in records if x["run"]["method"] == "full"]
    main(command)
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == len(records)
    capsys.readouterr()
    main(output)
    printed = capsys.readouterr().out
    assert f"## {task}, texts, window 100" in printed
    if task != "babilong":
        answers = [y for x in of_full for y in x["result"]["answers"]]
        answers = [x for x in answers if x[0] == answers[0][0]]
        assert f"{sum(x[3] for x in answers):.3g} of {len(answers)}" in printed
    with pytest.raises(SystemExit):
        main([*command, "--methods", "wndow"])

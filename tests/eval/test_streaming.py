"""eval/streaming: readers and memories see no token of the future, facts are new, and records become tables."""

import json
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
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from eval.streaming import conversation, facts, readers, ruler, tasks
from eval.streaming.__main__ import SCORES, main
from eval.streaming.mixtures import MIXTURES, fit_shares
from eval.streaming.reading import Stream, choose_links, prepare, read_text
from eval.streaming.tables import interval
from titans_hf.cli.training.tokenizer import byte_tokenizer
from titans_hf.remember import remember

ROOT = Path(__file__).parents[2]
WINDOW = 20
COLUMN = 2 * 2 * 3 * 2 * 8  # bytes of the keys and values of a token of `tiny_model`
STORIES = {  # facts, a question, its answer
    "qa1": (["Mary went to the hall"], "Where is Mary?", "hall"),
    "qa2": (["Mary got the milk", "Mary went to the hall"], "Where is the milk?", "hall"),
    "qa3": (["Mary got the milk", "Mary went to the hall", "Mary went to the den"],
            "Where was the milk before the den?", "hall"),
}  # fmt: skip
READERS = {
    "full": lambda model: readers.Attention(model),
    "window": lambda model: readers.Attention(model, WINDOW),
    "streaming": lambda model: readers.Attention(model, WINDOW, near=False),
    **{
        score: lambda model, score=score: readers.Attention(model, WINDOW, budget=16 * COLUMN, score=score)
        for score in SCORES
    },
    "sgd": lambda model: readers.Steps(model, WINDOW, rate=0.5),
    "rms": lambda model: readers.Steps(model, WINDOW, rate=0.01, decay=0.01),
    "bm25": lambda model: readers.Retrieval(model, 2 * WINDOW),
    "both": lambda model: readers.Remember(model, WINDOW, memory=("fast_weights", "list")),
}


def tiny_model() -> LlamaForCausalLM:
    """A random Llama whose predictions are far from uniform."""
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, **sizes)).eval()
    for x in model.parameters():
        x.data *= 3
    return model


def small_pieces(reader: readers.Reader, piece: int = 8) -> readers.Reader:
    """Lets a reader call the model with so few tokens."""
    reader.piece = piece
    return reader


@pytest.mark.parametrize("name", READERS)
def test_a_loss_depends_on_earlier_tokens_alone(name):
    """With every memory behind a reader, losses before a place stay when the tokens after it are others; a text read
    again has the same losses: nothing is left of the text before."""
    reader = small_pieces(READERS[name](tiny_model()))
    first, second = torch.randint(60, (2, 171), generator=torch.Generator().manual_seed(1))
    first[85:] = first[:86].clone()  # so that memories and blocks are found
    second = torch.cat([first[:150], second[150:]])
    links = {"all": choose_links(prepare(reader, [first]), [x for x in MIXTURES if x != "search"])[0], "none": []}
    texts = [read_text(reader, links, ids, {170}) for ids in (first, second, first)]
    for name in links:
        losses = [x[name].losses for x in texts]
        torch.testing.assert_close(losses[0][:149], losses[1][:149])
        assert losses[0].tolist() == losses[2].tolist() and len(losses[0]) == 170
    assert texts[0]["all"].losses.mean() < texts[0]["none"].losses.mean()  # the choice was made on this text
    assert texts[0]["all"].state_bytes > texts[0]["none"].state_bytes > 0


def test_full_and_window_are_the_model_s_own():
    """Full attention in pieces is one call of the model; a window is `remember` without memories, in other pieces."""
    ids, model = torch.randint(60, (1100,)), tiny_model()
    expected = -torch.log_softmax(model(ids[None]).logits[0], -1)[:-1].gather(1, ids[1:, None])[:, 0].double()
    found = read_text(small_pieces(readers.Attention(model)), {"": []}, ids)[""].losses
    torch.testing.assert_close(found, expected.detach(), atol=1e-4, rtol=0)
    windowed = read_text(small_pieces(readers.Attention(tiny_model(), WINDOW)), {"": []}, ids)[""].losses
    logits = remember(tiny_model(), WINDOW, ())(ids[None]).logits[0].detach()
    torch.testing.assert_close(
        windowed, cross_entropy(logits[:-1], ids[1:], reduction="none").double(), atol=1e-4, rtol=0
    )
    assert not torch.allclose(windowed, found, atol=1e-2)


def test_steps_are_those_of_sgd():
    """The second piece is read by weights that a step on the first has left, its last target included."""
    model, ids = tiny_model(), torch.randint(60, (20,))
    losses = read_text(small_pieces(readers.Steps(model, WINDOW, rate=0.3), 10), {"": []}, ids)[""].losses
    plain = tiny_model()
    first = cross_entropy(plain(ids[None, :10]).logits[0], ids[1:11], reduction="none")
    torch.testing.assert_close(losses[:10], first.detach().double(), atol=1e-5, rtol=0)
    cache = plain(ids[None, :10]).past_key_values
    for x, g in zip(plain.parameters(), torch.autograd.grad(first.mean(), list(plain.parameters())), strict=True):
        x.data -= 0.3 * g
    second = cross_entropy(plain(ids[None, 10:19], past_key_values=cache).logits[0], ids[11:], reduction="none")
    torch.testing.assert_close(losses[10:], second.detach().double(), atol=1e-4, rtol=0)


def test_a_tiny_root_makes_no_large_step():
    """Weights without a gradient in the choice texts, as those of rare words, move about as far as the others do."""
    reader, ids = small_pieces(READERS["rms"](tiny_model())), torch.randint(60, (100,))
    reader.prepare([ids])
    reader.rms[0].mul_(1e-9)  # the embedding
    read_text(reader, {"": []}, ids)
    moved = [(x - y).abs().max() for x, y in zip(reader.model.parameters(), reader.trained, strict=True)]
    assert 0 < moved[0] < 10 * max(moved[1:]), moved


def test_eviction_keeps_what_a_score_names():
    """Of three equal keys and another the other stays (KeyDiff), and the column that is attended to (TOVA, SnapKV); the
    cache never grows beyond window and budget."""
    keys = torch.tensor([[[1.0, 0], [1, 0], [0, 1], [1, 0]]])
    weights = torch.zeros(2, 5, 40)
    weights[:, -1, 30] = 1
    assert readers.score_columns("keydiff", keys, None).argmax() == 2
    for name in ("tova", "snapkv"):
        assert abs(readers.score_columns(name, keys, weights).argmax().item() - 30) <= 3 * (name == "snapkv")
    for bits, extra in ((16, 14), (4, 28)):  # 4 bits and, for each head's 8 numbers, 32 more are 8 bits a number
        reader = readers.Attention(tiny_model(), WINDOW, budget=16 * COLUMN, score="tova", bits=bits)
        reader.begin()
        for piece in torch.randint(60, (100,)).split(reader.piece):
            reader.read(piece)
            assert reader.state_bytes() - min(reader.start, WINDOW) * COLUMN <= 16 * COLUMN
        assert {x.keys.shape[-2] for x in reader.cache.layers} == {extra + WINDOW - 1}


@pytest.mark.parametrize("score", SCORES)
def test_eviction_that_keeps_all_is_full_attention(score):
    """With bytes for the whole text an evicting reader has the losses of full attention, in 16 bits and nearly in 8."""
    ids, losses = torch.randint(60, (300,)), []
    for bits in (16, 8, 2):
        reader = small_pieces(readers.Attention(tiny_model(), WINDOW, budget=1e9, score=score, bits=bits))
        losses.append(read_text(reader, {"": []}, ids)[""].losses)
    expected = read_text(readers.Attention(tiny_model()), {"": []}, ids)[""].losses
    torch.testing.assert_close(losses[0], expected, atol=1e-4, rtol=0)
    errors = [(x - expected).abs().mean() for x in losses[1:]]
    assert 0 < 10 * errors[0] < errors[1], errors


def test_quantised_numbers_are_near():
    """Numbers of 4 bits are at most half a step away: a fifteenth of the range of their group; rounded ones stay."""
    x = torch.randn(3, 5, 64) * torch.logspace(-2, 2, 64)
    rounded = readers.quantise(x, 4)
    groups = x.unflatten(-1, (2, 32))
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    assert ((rounded.unflatten(-1, (2, 32)) - groups).abs() <= 0.51 * step).all()
    assert len(rounded[0, 0, :32].unique()) <= 16
    torch.testing.assert_close(readers.quantise(rounded, 4), rounded, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_memory_does_not_depend_on_the_pieces(name):
    """A memory says the same however the text is cut, and its words' probabilities sum to at most 1."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(12, (60,), generator=generator)
    states = torch.randn(60, 8, generator=generator) + torch.nn.functional.one_hot(ids, 12)[:, :8]
    found = []
    for cuts in ([60], [1, 7, 20, 2, 30]):
        memory = MIXTURES[name](**MIXTURES[name].options[-1])
        memory.prepare(states)
        memory.begin()
        parts = [memory.predict(x, y) for x, y in zip(ids.split(cuts), states.split(cuts), strict=True)]
        dense = [torch.zeros(len(x.buckets), 12).index_add_(1, x.tokens, x.weights) for x in parts]
        found.append(torch.cat([torch.cat(dense), torch.cat([x.buckets for x in parts])[:, None]], 1))
    torch.testing.assert_close(*found)
    assert found[0][:, :-1].sum(1).max() <= 1.0001


def test_shares_are_the_best():
    """No share on a grid has a lower loss, in any bucket."""
    generator = torch.Generator().manual_seed(3)
    p, m = torch.rand(2, 4000, generator=generator, dtype=torch.double)
    buckets = torch.randint(2, (4000,), generator=generator)
    m = m * (buckets == 1) * 0.9
    for bucket, share in enumerate(fit_shares(p, m, buckets, 2)):
        grid = torch.linspace(0, 0.99, 100)[:, None]
        mine = buckets == bucket
        losses = -((1 - grid) * p[mine] + grid * m[mine]).log().mean(1)
        assert abs(share - grid[losses.argmin(), 0]) < 0.02


def test_facts_occur_in_no_other_file():
    """No value, person or sentence of a fact is in any other file of the project: no fit can have seen it."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    own = ("eval/results/streaming", "eval/streaming/facts.py")
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
        for kind, begin, end, value, values in answers:
            question = re.split(r"\. |\n\n", tokenizer.decode(ids[:begin]))[-1]
            assert tokenizer.decode(ids[begin:end]) == f" {value}" and question in asked and told.count(value) == 1
            lines = [x for x in re.split(r"(?<=\.) ", told.strip()) if x.startswith(question)]
            assert len(lines) == {"begun": 1, "pair": 1, "cloze": 0, "updated": 2, "absent": 0}[kind]
            assert kind in ("cloze", "absent") or lines[-1] == f"{question} {value}."
            if kind == "pair":
                last = question.split()[-1]
                assert sum(f" {last} " in x for x in told.split(".")) >= 2
            tops = {i - 1: int(ids[i]) for i in range(begin, end)}
            answer = facts.Answer(kind, begin, end, value, values)
            assert facts.judge(answer, ids, tops, tokenizer) == (value if kind != "absent" else " ", kind != "absent")


def test_runs_become_lines_and_tables(tmp_path, capsys):
    """A command writes a line for each text and method, leaves out those that are there, and prints the tables."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=2))  # fmt: skip
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / name).write_text(f"{name} It rained all day in the town. " * 100)
    common = ["--text", str(tmp_path / "texts"), "--choice_text", str(tmp_path / "texts"), "--choice_tokens=200"]
    common += ["--window=64", "--output", str(tmp_path / "runs.jsonl"), "--bytes", "1e4"]
    command = [
        str(tmp_path / "model"),
        "--methods",
        "window+match",
        "window",
        "full",
        "longer",
        *common,
        "--tokens=520",
    ]
    main(command)
    main(
        [
            str(tmp_path / "model"),
            "--task=facts",
            "--lengths",
            "100",
            "200",
            "--methods",
            "full",
            "window+search",
            *common,
        ]
    )
    lines = [json.loads(x) for x in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 4 + 2 * 2 and len(lines[0]["result"]["losses"]) == 3
    assert sum(len(x["result"].get("answers", [])) for x in lines) == 2 * 2 * 20
    begun = {method: sum(y[3] for x in lines for y in x["result"].get("answers", []) if y[0] == "begun"
                         and x["run"]["method"] == method) for method in ("full", "window+search")}  # fmt: skip
    assert begun["window+search"] > begun["full"] == 0, begun  # a search needs no trained model
    main(command)
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 12
    capsys.readouterr()
    main(["--output", str(tmp_path / "runs.jsonl"), "--plot", str(tmp_path / "plot.png")])
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if "|" in line]
    by_method = {row[0]: row for row in rows}
    base, better = ([x["result"]["losses"] for x in lines if x["run"]["method"] == y and x["run"]["task"] == "loss"]
                    for y in ("window", "window+match"))  # fmt: skip
    assert by_method["longer 0.01 MB"][1] == "0.01" and by_method["window"][2].startswith("0.000")
    gain = np.mean(np.array(base) - np.array(better))
    assert gain > 0.5 and f"{gain:.3f}" in [x.split()[0] for row in rows for x in row[2:3]]
    assert (tmp_path / "plot.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="--methods has wndow: readers are full"):
        main([name, "--methods", "wndow", *common])


@pytest.fixture(scope="module")
def tokenizer():
    """A vocabulary of words, with a chat template."""
    texts = [BOOK, string.ascii_letters, *ruler_texts(), *(x for fact in conversation.SENTENCES for x in fact)]
    result = byte_tokenizer().train_new_from_iterator(texts * 3, 900, show_progress=False)
    result.chat_template = (
        "{% for x in messages %}<{{ x.role }}>\n{{ x.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    )
    return result


def ruler_texts() -> list[str]:
    """The words of lm-eval's own prompts."""
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

    return [cwe_utils.TEMPLATE, fwe_utils.TEMPLATE, vt_utils.TEMPLATE, " ".join(cwe_utils.WORDS[:2000])]


@pytest.mark.parametrize("task", ruler.GENERATED)
def test_prompts_of_ruler_can_be_solved(task, tokenizer):
    """What an answer must contain is what a program finds in the prompt, which has the length that was asked for."""
    parts = ruler.make_prompts(tokenizer, 4, [BOOK, "Another text. It goes on. " * 200], 0, task, 2048)
    assert len(parts) == 4 == len({prompt for prompt, _ in parts})
    for prompt, ((kind, end, wanted, _, generated),) in parts:
        assert kind == task and 400 < len(tokenizer(prompt).input_ids) + (task != "fwe") * generated <= 2048
        if task.startswith("niah"):
            found = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", prompt)
            assert [x[1] for x in found] == wanted and found[0][0] in end
        elif task == "vt":
            values, asked = {}, re.search(r"assigned the value (\d+) in the text above", prompt.split("Question")[-1])
            for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", prompt):
                values[name] = values.get(value, value)
            assert [name for name, value in values.items() if value == asked[1]] == wanted
        else:
            pattern = r"\d+\. (.+?)(?= \d+\. |$)" if task == "cwe" else r"\b[a-z]{6}\b"
            words = prompt.split("\n")[1] if task == "cwe" else prompt.split("coded words. ")[1].split("\n")[0]
            counts = Counter(re.findall(pattern, words))
            assert {x for x, _ in counts.most_common(len(wanted))} == set(wanted)
    assert ruler.score("no", wanted) == 0 and ruler.score(" ".join(wanted).upper(), wanted) == 1
    if task in ("vt", "cwe"):
        with pytest.raises(ValueError, match=f"--lengths 300 is too short for {task}"):
            ruler.make_prompts(byte_tokenizer(), 1, [BOOK], 0, task, 300)


def test_a_conversation_has_the_answers_of_its_questions(tokenizer):
    """The right option is what was told last of this person; the old value or another person's is an option too."""
    for seed in range(20):
        chat, questions = conversation.make_conversation(BOOK, tokenizer, str(seed))
        assert Counter(x.kind for x in questions) == {"told": 10, "changed": 8, "persons": 7}
        assert 8 * 300 < len(tokenizer(chat).input_ids) <= 8 * 400
        told = dict[str, list[str]]()
        for line in re.findall(r"<user>\n(.*)\. Please read on\.", chat):
            begun, _, value = line.rpartition(" ")
            told.setdefault(begun, []).append(value)
        for kind, text, value, options, _ in questions:
            begun = text.split("\n")[-1].replace("You", "I", 1)
            assert value == told[begun][-1] and len(told[begun]) == 1 + (kind == "changed")
            assert value in options and len(set(options)) == 4 and set(options) <= {x for y in told.values() for x in y}
            others = [x for y in told if y.split(" ", 1)[1] == begun.split(" ", 1)[1] and y != begun for x in told[y]]
            assert set(told[begun]) <= set(options) and (kind != "persons" or set(others) & set(options))


@pytest.mark.parametrize("name", [x for x in READERS if x not in ("sgd", "rms")])
def test_a_branch_leaves_nothing(name):
    """After `restore`, a reader and its memories say what they say if nothing was read since `save`."""
    reader, ids = small_pieces(READERS[name](tiny_model())), torch.randint(60, (120,))
    links = choose_links(prepare(reader, [ids]), [x for x in MIXTURES if x != "search"])[0]
    stream = Stream(reader, {"": links})
    for _ in stream.read(ids[:90]):
        pass
    saved = stream.save()
    first = stream.after(ids[90:])[""]
    for other in (ids[:70], ids[90:]):
        stream.restore(saved)
        torch.manual_seed(3)
        again = stream.after(other)[""]
    if name != "random":  # it draws anew
        torch.testing.assert_close(again, first, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="sgd and rms change the model"):
        tasks.ask(Stream(READERS["sgd"](tiny_model()), {}), [], byte_tokenizer())


@pytest.mark.parametrize("task", ["ruler", "babilong", "conversation"])
def test_a_record_has_the_model_s_own_answers(task, tokenizer, tmp_path, capsys, monkeypatch):
    """Of full attention every option's probability, and every generated answer, is that of the model called alone."""
    torch.manual_seed(1)
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.2, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text(BOOK)
    (tmp_path / "stories").mkdir()
    for kind, (story, question, place) in STORIES.items():
        lines = [f"1 {x}." for x in story] + [f"2 {question} \t{place}\t1"]
        text = "\n".join(lines + [x.replace(place, "attic") for x in lines])
        (tmp_path / "stories" / f"{kind}_x_test.txt").write_text(text)
    monkeypatch.setattr(ruler, "GENERATED", {"niah_single_2": 12, "fwe": 9})
    output = ["--output", str(tmp_path / "runs.jsonl")]
    number = f"--number={1 if task == 'conversation' else 2}"
    command = [str(tmp_path / "model"), "--task", task, "--methods", "full", "window+match", "--window=64",
               number, "--choice_tokens=200", "--text", str(tmp_path / "book.txt"), "--choice_text",
               str(tmp_path / "book.txt"), "--stories", str(tmp_path / "stories"), "--place=0", *output]  # fmt: skip
    lengths = {"ruler": ["1500"], "babilong": ["0", "300"], "conversation": []}[task]
    made, asked = [], tasks.ask
    monkeypatch.setattr(tasks, "ask", lambda stream, parts, _: made.append(parts) or asked(stream, parts, _))
    main([*command, *(["--lengths", *lengths] if lengths else [])])
    records = [json.loads(x) for x in (tmp_path / "runs.jsonl").read_text().splitlines()]
    full = [x for x in records if x["run"]["method"] == "full"]
    assert len(records) == 2 * len(full) == len(made) and all(x["bytes"] > 0 and x["config"] for x in records)
    for record, parts in zip(full, made, strict=False):
        questions = [(context, x) for context, asked in parts for x in asked]
        for (context, question), (kind, value, said, right, *log_p) in zip(
            questions, record["result"]["answers"], strict=True
        ):
            assert (kind, value) == (question.kind, question.value)
            ids = tasks.tokenize(context, tokenizer).tolist() + tasks.tokenize(question.text, tokenizer).tolist()
            if task == "ruler":
                expected = model.generate(torch.tensor([ids]), max_new_tokens=question.generated, do_sample=False)
                assert said == tokenizer.decode(expected[0, len(ids) :], skip_special_tokens=True)
                assert right == ruler.score(said, value)
                continue
            assert list(log_p[0]) == question.options and said == max(log_p[0], key=log_p[0].get)
            assert right == (said == value)
            option = tasks.tokenize(f" {said}", tokenizer)
            logits = model(torch.tensor([ids + option.tolist()])).logits[0, len(ids) - 1 : -1]
            assert abs(-cross_entropy(logits, option, reduction="sum").item() - log_p[0][said]) < 2e-3
    main([*command, *(["--lengths", *lengths] if lengths else [])])
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == len(records)
    capsys.readouterr()
    main(output)
    printed = capsys.readouterr().out
    right = sum(x[3] for x in full[0]["result"]["answers"] if x[0] == full[0]["result"]["answers"][0][0])
    assert f"## {task}, texts, window 64" in printed and f"{right:.3g} of " in printed
    if task == "babilong":
        assert {x["run"]["text"] for x in records} == {f"qa{i}, 0 tokens" for i in (1, 2, 3)}  # at chance: it stops
        with pytest.raises(ValueError, match="babilong needs --methods full --lengths 0 first, of qa1"):
            main([*command, "--lengths", "300", "--seed=1"])


def test_interval_is_student_s():
    """0, 1, 2 have the mean 1 and, with two degrees of freedom, a half width of 4.303 / sqrt(3)."""
    assert interval(np.array([0.0, 1.0, 2.0]), ".2f") == "1.00 [-1.48, 3.48]"

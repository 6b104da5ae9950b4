"""eval/streaming: readers and memories see no token of the future, facts are new, and records become tables."""

import json
import re
import subprocess
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from eval.streaming import facts, readers
from eval.streaming.__main__ import main
from eval.streaming.mixtures import MIXTURES, fit_shares
from eval.streaming.reading import choose_links, prepare, read_text
from eval.streaming.tables import interval
from titans_hf.cli.training.tokenizer import byte_tokenizer
from titans_hf.remember import remember

ROOT = Path(__file__).parents[2]
WINDOW = 20
READERS = {
    "full": lambda model: readers.Attention(model),
    "window": lambda model: readers.Attention(model, WINDOW),
    "streaming": lambda model: readers.Attention(model, WINDOW, near=False),
    **{
        score: lambda model, score=score: readers.Attention(model, WINDOW, extra=9, score=score)
        for score in ("random", "tova", "keydiff", "snapkv")
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


def test_eviction_keeps_what_a_score_names():
    """Of three equal keys and another the other stays (KeyDiff), and the column that is attended to (TOVA, SnapKV); the
    cache never grows beyond window and budget."""
    keys = torch.tensor([[[1.0, 0], [1, 0], [0, 1], [1, 0]]])
    weights = torch.zeros(2, 5, 40)
    weights[:, -1, 30] = 1
    assert readers.score_columns("keydiff", keys, None).argmax() == 2
    for name in ("tova", "snapkv"):
        assert abs(readers.score_columns(name, keys, weights).argmax().item() - 30) <= 3 * (name == "snapkv")
    reader = READERS["tova"](tiny_model())
    reader.begin()
    for piece in torch.randint(60, (100,)).split(10):
        reader.read(piece)
    assert {x.keys.shape[-2] for x in reader.cache.layers} == {9 + WINDOW - 1}


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


def test_interval_is_student_s():
    """0, 1, 2 have the mean 1 and, with two degrees of freedom, a half width of 4.303 / sqrt(3)."""
    assert interval(np.array([0.0, 1.0, 2.0]), ".2f") == "1.00 [-1.48, 3.48]"

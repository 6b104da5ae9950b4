"""eval.needles: what is hidden, where and at which length; scores are of the model's own texts."""

import itertools
import json

import pytest
from byte_model import save_byte_model, save_llama
from covering import in_one_test
from eval_common import BOOK, SHARED, STORIES, needs_shared_data

from titans_hf.cli.training.tokenizer import byte_tokenizer

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")
from eval.needles import babilong, passkey, run

TOKENIZER = byte_tokenizer()


def num_tokens(text):
    return len(TOKENIZER(text).input_ids)


@pytest.fixture
def folder(tmp_path):
    """A model that reads bytes, bAbI's stories and a book."""
    save_byte_model(tmp_path / "model", "lmm")
    for name in ("stories", "books"):
        (tmp_path / name).mkdir()
    for name, text in STORIES.items():
        (tmp_path / "stories" / f"{name}_test.txt").write_text(text)
    (tmp_path / "books" / "a.txt").write_text(BOOK)
    return tmp_path


@in_one_test("length", [1024, 2048, 3001])
def test_a_pass_key_fills_its_length(length):
    """A prompt and its answer fill the length to a line of noise, wherever the number lies; prompts are the same
    however many are asked for.
    """
    samples = list(passkey.make_samples(TOKENIZER, length, 40))
    assert samples[:3] == list(passkey.make_samples(TOKENIZER, length, 3))
    places = [sample["input"].index("One of the special magic") / length for sample in samples]
    assert min(places) < 0.25 and max(places) > 0.5
    assert len({sample["target"] for sample in samples}) == 40
    for sample in samples:
        tokens = num_tokens(sample["input"]) + passkey.GENERATED_TOKENS
        assert length - len(passkey.NOISE) - 16 < tokens <= length
        assert sample["input"].count(sample["target"]) == 1


def test_questions_have_the_facts_before_them(folder):
    """Each question has the facts of its story up to it, and no others."""
    assert list(babilong.read_questions(folder / "stories", "qa1")) == [
        (["Mary went to the hall.", "John ran to the garden."], "Where is Mary?", "hall"),
        (
            ["Mary went to the hall.", "John ran to the garden.", "Mary left for the office."],
            "Where is Mary?",
            "office",
        ),
        (["Sandra moved to the garden."], "Where is Sandra?", "garden"),
    ]


@in_one_test("length", [150, 1024, 50_000])
def test_stories_fill_the_length_in_their_order(folder, length):
    """The facts lie in their order among sentences of the book in theirs, which fill the length to one sentence."""
    questions = list(babilong.read_questions(folder / "stories", "qa1"))
    samples = list(babilong.make_samples(iter(questions), folder / "books", TOKENIZER, length))
    text = " ".join(BOOK.split())
    for (facts, _, _), sample in zip(questions, samples, strict=True):
        found = sample["input"]
        assert length - 40 < num_tokens(found) <= length
        places = [found.index(fact) for fact in facts]
        assert places == sorted(places)
        for fact in facts:
            found = found.replace(f"{fact} ", "", 1) if f"{fact} " in found else found.replace(f" {fact}", "", 1)
        assert found in f"{text} {text}"


def test_facts_lie_anywhere_or_alone(folder):
    """Facts occur from the start of a sample to its end; length 0 has the facts alone; too long ones are left out."""
    one = babilong.Question(["Sandra moved to the garden."], "Where is Sandra?", "garden")
    rows = list(babilong.make_samples(itertools.repeat(one, 100), folder / "books", TOKENIZER, 2000))
    places = [row["input"].index("Sandra") / 2000 for row in rows]
    assert min(places) < 0.1 and max(places) > 0.85
    (alone,) = babilong.make_samples(iter([one]), folder / "books", TOKENIZER, 0)
    assert alone == {"input": one.facts[0], "question": one.text, "target": one.answer}
    assert list(babilong.make_samples(iter([one]), folder / "books", TOKENIZER, 20)) == []


@needs_shared_data
def test_the_files_have_a_thousand_questions():
    """Each test file has a thousand questions, whose answers are six or seven words."""
    for i in range(1, 6):
        answers = [x.answer for x in babilong.read_questions(SHARED / "babi" / "en-10k", f"qa{i}")]
        assert len(answers) == 1000 and len({*answers}) == (7 if i == 5 else 6)


@pytest.mark.parametrize("task", ["passkey", "qa1"])
def test_scores_are_of_the_models_texts(folder, task, monkeypatch):
    """An answer that has the right words anywhere counts, for a Titans and another model; each length is a line."""
    save_llama(folder / "llama", max_position_embeddings=2048)
    asked = []

    def answer(lm, requests, **kwargs):
        prompts = [request.args[0] for request in requests]
        asked.append(prompts)
        right = [prompt.split(" is: ")[-1][:7] if task == "passkey" else "Hall, I think" for prompt in prompts]
        return [f" {text}." if i else "nowhere" for i, text in enumerate(right)]

    monkeypatch.setattr(run.TitansLM, "generate_until", answer)
    monkeypatch.setattr(run.HFLM, "generate_until", answer)
    data = ["--stories", folder / "stories", "--books", folder / "books"]
    options = ["--lengths", 1024, 1200, "--limit", 3, "--device", "cpu", "--output", folder / "x.jsonl", *data]
    run.main([task, str(folder / "model"), str(folder / "llama"), *map(str, options)])
    lines = [json.loads(line) for line in (folder / "x.jsonl").read_text().splitlines()]
    found = [(line["name"], line["length"], line["result"]["documents"]) for line in lines]
    assert found == [(name, length, 3) for name in ("model", "llama") for length in (1024, 1200)]
    expected = 2 / 3 if task == "passkey" else 0  # the first of qa1 is the hall, answered wrongly
    assert [line["result"]["acc"] for line in lines] == pytest.approx([expected] * 4)
    assert len(asked) == 4 and all(len(prompts) == 3 for prompts in asked)
    if task == "qa1":
        assert all("The most recent location of Charlie is balcony.\n\n" in prompts[0] for prompts in asked)
        assert all(prompts[1].endswith("\nWhere is Mary?") for prompts in asked)


@in_one_test(
    "arguments,message",
    [
        (["passkey", "--lengths", "300"], "length 172 is too short for a pass-key"),
        (["qa1", "--lengths", "0"], "qa1 needs --stories and --books"),
        (["qa1", "--lengths", "20", "--stories", "stories", "--books", "books"], "--lengths 20 is too short"),
        (["qa7", "--lengths", "20"], None),
        (["qa2", "--lengths", "20", "--stories", "stories", "--books", "books"], "must hold one qa2_"),
    ],
)
def test_bad_input_is_named(folder, monkeypatch, arguments, message):
    """What cannot be asked is an error that names it, before a model is loaded."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(run, "TitansLM", lambda **options: pytest.fail("loaded a model"))
    with pytest.raises((ValueError, SystemExit), match=message):
        run.main([arguments[0], "model", *arguments[1:], "--output", "out.jsonl"])

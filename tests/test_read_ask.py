"""scripts/read.py and scripts/ask.py: interrupted readings lose no tokens, and asking leaves the memory unchanged."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_model import save_byte_model
from test_memory_files import assert_equal
from tiny_run import LLAMA, SCRIPT

from titans_hf import TitansCache
from titans_hf.cache_files import read_description
from titans_hf_scripts import ask, read
from titans_hf_scripts.training.documents import load_splits
from titans_hf_scripts.training.tokenizer import byte_tokenizer

TEXT = "Es war einmal ein König, der hatte zwölf Töchter. 東京 " * 9


@pytest.fixture
def paths(tmp_path):
    """A checkpoint, a text in three parts, and where to save."""
    model = save_byte_model(tmp_path / "model", "mag")
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, part in zip(("a", "b", "c"), TEXT.split("Töchter", 2), strict=True):
        (texts / f"{name}.txt").write_text(part)
    (texts / "ignored.md").write_text("not a text file")
    return SimpleNamespace(model=str(tmp_path / "model"), net=model, texts=texts, memory=tmp_path / "memory")


def whole_text(paths) -> str:
    return "\n".join((paths.texts / f"{name}.txt").read_text() for name in "abc")


def ids_of(text: str) -> torch.Tensor:
    """Returns the ids of a text as in training, where special tokens in the text are text."""
    return byte_tokenizer()(text, return_tensors="pt", split_special_tokens=True).input_ids


def expected(paths, text: str) -> TitansCache:
    """Returns the cache of a model that reads the text in one call."""
    with torch.no_grad():
        return paths.net.model(ids_of(text), use_cache=True).past_key_values


def load(paths, memory: Path | None = None) -> TitansCache:
    return TitansCache.from_pretrained(memory or paths.memory, paths.net)


def assert_has_read(paths, text: str, memory: Path | None = None) -> None:
    found, wanted = load(paths, memory), expected(paths, text)
    for ours, theirs in zip(found.layers, wanted.layers, strict=True):
        torch.testing.assert_close(ours.named_tensors(), theirs.named_tensors(), rtol=1e-4, atol=1e-4)
    assert found.get_seq_length() == ids_of(text).shape[1]


def flags(**options) -> list[str]:
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]


def run_read(paths, *texts, **changes) -> read.Reading:
    return read.main(
        [paths.model, *map(str, texts), *flags(**dict(memory=paths.memory, piece=32, save_every=100) | changes)]
    )


@pytest.mark.parametrize("block", [1, 7, read.BLOCK])
def test_reading_a_folder(block, paths, monkeypatch):
    """Reading a folder gives the memory of its joined texts, for any block size: otherwise characters or words across
    block and file borders would be changed.
    """
    monkeypatch.setattr(read, "BLOCK", block)
    run_read(paths, paths.texts)
    assert_has_read(paths, whole_text(paths))


def test_reading_standard_input(paths, monkeypatch):
    """Reading files and standard input gives the memory of the joined text: otherwise piped text would be read
    differently.
    """
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode())))
    run_read(paths, paths.texts / "a.txt", "-")
    assert_has_read(paths, (paths.texts / "a.txt").read_text() + "\n" + TEXT)


def test_a_killed_reading_goes_on(paths):
    """A reading killed with SIGKILL and repeated gives the memory of an uninterrupted one, and loses at most
    --save_every tokens: otherwise a crash would cost the whole reading.
    """
    text = " ".join(str(i) for i in range(900)).encode()
    options = [paths.model, "-", "--memory", str(paths.memory), "--save_every", "100", "--piece", "32"]
    process = subprocess.Popen([sys.executable, SCRIPT.with_name("read.py"), *options], stdin=subprocess.PIPE)
    process.stdin.write(text[:2000].ljust(read.BLOCK))
    process.stdin.flush()
    deadline = time.monotonic() + 120
    while not (paths.memory / "memory.json").exists() or read_description(paths.memory)["tokens_seen"] < [1000]:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_seen = read_description(paths.memory)["tokens_seen"][0]
    assert num_seen % 96 == 0
    (paths.texts / "all.txt").write_bytes(text[:2000].ljust(read.BLOCK) + text[2000:])
    resumed = run_read(paths, paths.texts / "all.txt")
    assert resumed.num_read == read.BLOCK + len(text) - 2000
    whole = paths.memory.with_name("whole")
    run_read(paths, paths.texts / "all.txt", memory=whole)
    assert_equal(load(paths), load(paths, whole))


def test_an_interruption_costs_no_more_than_said(paths, monkeypatch):
    """At most --save_every tokens lie between two saves, for any --piece: otherwise an interruption would lose more
    than documented.
    """
    saved, counted, save, count = [], [], read.Reading.save, read.Reading._count

    def save_and_note(self):
        saved.append(self.num_read)
        save(self)

    def count_and_note(self, tokens):
        count(self, tokens)
        counted.append(self.num_read - (saved[-1] if saved else 0))

    monkeypatch.setattr(read.Reading, "save", save_and_note)
    monkeypatch.setattr(read.Reading, "_count", count_and_note)
    total = run_read(paths, paths.texts, save_every=100, piece=32).num_read
    assert max(counted) <= 100 and saved[-1] == total and len(saved) >= total // 100


def test_more_texts_are_read_on_with(paths):
    """Adding texts reads only the new ones, and --append any text: otherwise a new text would mean reading everything
    again.
    """
    a, b, c = (paths.texts / f"{name}.txt" for name in "abc")
    run_read(paths, a)
    assert run_read(paths, a, b).num_read == 96
    run_read(paths, a, b, c)
    assert_has_read(paths, whole_text(paths))
    run_read(paths, a, append=True)
    assert load(paths).layers[0].state.memory.num_seen.item() == len(whole_text(paths).encode()) + len(a.read_bytes())
    run_read(paths, a)  # what was appended is known as well


def stop_reading_at(number, monkeypatch) -> None:
    """Makes a reading raise KeyboardInterrupt when it has counted `number` tokens or more."""
    count = read.Reading._count

    def counted(self, tokens):
        count(self, tokens)
        if self.num_read >= number:
            raise KeyboardInterrupt

    monkeypatch.setattr(read.Reading, "_count", counted)


def test_an_append_that_was_stopped_goes_on(paths, monkeypatch):
    """A stopped and repeated --append reads every text once, and after its end appends again: otherwise a part of the
    text would be read twice.
    """
    a, c = paths.texts / "a.txt", paths.texts / "c.txt"
    run_read(paths, a)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_reading_at(128, patch)
        run_read(paths, c, append=True)
    assert read_description(paths.memory)["tokens_seen"] == [len(a.read_bytes()) + 96]
    resumed = run_read(paths, c, append=True)
    whole = paths.memory.with_name("whole")
    run_read(paths, a, memory=whole)
    run_read(paths, c, memory=whole, append=True)
    assert resumed.num_read == len(c.read_bytes())
    assert_equal(load(paths), load(paths, whole))
    run_read(paths, c, append=True)
    assert read_description(paths.memory)["tokens_seen"] == [len(a.read_bytes()) + 2 * len(c.read_bytes())]


@pytest.mark.parametrize("append", [False, True])
def test_appending_to_a_reading_that_was_stopped(append, paths, monkeypatch):
    """Appending to an unfinished reading raises an error unless --abandon is given: otherwise the memory would have
    half a text without notice.
    """
    a, b, c = (paths.texts / f"{name}.txt" for name in "abc")
    run_read(paths, a)
    texts = [c] if append else [a, c]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_reading_at(190, patch)
        run_read(paths, *texts, **({"append": True} if append else {}))
    with pytest.raises(ValueError, match=r"tokens of other texts and was stopped before their end: .* --abandon"):
        run_read(paths, b, append=True)
    (num_seen,) = read_description(paths.memory)["tokens_seen"]
    run_read(paths, b, append=True, abandon=True)
    assert read_description(paths.memory)["tokens_seen"] == [num_seen + len(b.read_bytes())]


@pytest.mark.parametrize("reading", [5, {}, {"tokens": "5"}, {"tokens": 5, "sha256": "0", "finished": None}], ids=str)
def test_a_reading_that_cannot_have_been(reading, paths):
    """An inconsistent record of the reading in a memory raises ValueError: otherwise a memory made by others would end
    in a traceback.
    """
    cache = expected(paths, "by other means")
    cache.about["reading"] = reading
    cache.save_pretrained(paths.memory, paths.net)
    with pytest.raises(ValueError, match="its reading is"):
        run_read(paths, paths.texts)


SPECIAL = "Er sagte </s> und <pad> und <unk>, sonst nichts. " * 4


@pytest.mark.parametrize("block", [1, 7, read.BLOCK])
def test_special_tokens_in_a_text_are_text(block, paths, monkeypatch):
    """`</s>` in a file has the ids that training gives it: otherwise text could end a document for the model."""
    monkeypatch.setattr(read, "BLOCK", block)
    (paths.texts / "a.txt").write_text(SPECIAL)
    run_read(paths, paths.texts / "a.txt")
    assert_has_read(paths, SPECIAL)
    assert byte_tokenizer().eos_token_id not in ids_of(SPECIAL)[0]


@pytest.mark.parametrize("block", [1, 7, read.BLOCK])
def test_line_ends_are_those_of_training(block, paths, monkeypatch):
    r"""Line ends \r\n and \r are read as \n, as in training, also across blocks: otherwise a model would read
    characters it was not trained on.
    """
    monkeypatch.setattr(read, "BLOCK", block)
    text = "eins\r\nzwei\r\n\r\ndrei\rvier\r"
    (paths.texts / "a.txt").write_bytes(text.encode())
    run_read(paths, paths.texts / "a.txt")
    assert_has_read(paths, "eins\nzwei\n\ndrei\nvier\n")
    (trained_on,) = load_splits(str(paths.texts / "a.txt"), "--train_data", "train")["train"]["text"]
    assert trained_on == "eins\nzwei\n\ndrei\nvier\n"


def test_other_texts_are_refused(paths):
    """Continuing a memory with other texts raises an error: otherwise reading would continue in the middle of an
    unknown text.
    """
    a, b = paths.texts / "a.txt", paths.texts / "b.txt"
    run_read(paths, a, b)
    for texts in ([b], [a]):
        with pytest.raises(ValueError, match=r"has read [\d,]+ tokens of other texts: give the texts that it has read"):
            run_read(paths, *texts)
    cache = expected(paths, "by other means")
    cache.save_pretrained(paths.memory, paths.net)
    with pytest.raises(ValueError, match="was not made by reading texts"):
        run_read(paths, a)


def test_a_folder_whose_name_ends_in_txt_is_no_text(paths):
    """A folder x.txt is read as a folder: otherwise reading would stop with an error about a file that the user did not
    name.
    """
    expected_text = whole_text(paths)
    (paths.texts / "b1.txt").mkdir()
    run_read(paths, paths.texts)
    assert_has_read(paths, expected_text)
    with pytest.raises(ValueError, match=r"TEXT .*b1.txt holds no .txt files"):
        run_read(paths, paths.texts / "b1.txt")
    (paths.texts / "b1.txt" / "d.txt").write_text("Ende")
    run_read(paths, paths.texts / "b1.txt", append=True)
    assert read_description(paths.memory)["tokens_seen"] == [len(ids_of(expected_text)[0]) + 4]


@pytest.mark.parametrize("script", ["read.py", "ask.py", "surprise.py"])
def test_an_error_is_one_line(script, paths):
    """A script's error is one line that names the script: otherwise users would read a traceback."""
    options = {"read.py": ["missing.txt", "--memory", "m"], "surprise.py": ["missing.txt", "--output", "o"]}
    command = [sys.executable, SCRIPT.with_name(script), paths.model, *options.get(script, ["--memory", "missing"])]
    ended = subprocess.run(command, cwd=paths.texts, input="", capture_output=True, text=True)
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    assert line.startswith(f"{script}: error: ") and "missing" in line and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda paths: [str(paths.texts / "d.txt")], r"TEXT .*d.txt does not exist"),
        (lambda paths: [paths.model], "holds no .txt files"),
        (lambda paths: ["bad.txt"], "TEXT .*bad.txt is not UTF-8"),
        (lambda paths: [str(paths.texts), "--piece=0"], "--piece 0 must be at least 1"),
    ],
)
def test_bad_input_to_read(change, message, paths, monkeypatch):
    """Wrong arguments raise an error that names them before anything is saved: otherwise a user could not tell which to
    change.
    """
    monkeypatch.chdir(paths.texts)
    Path("bad.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=message):
        read.main([paths.model, *change(paths), "--memory", str(paths.memory)])
    assert not paths.memory.exists()


def test_what_has_no_memory_is_refused(paths):
    """A folder without a checkpoint, or a model without a memory, raises an error at once: otherwise it would fail
    inside the model, or after reading.
    """
    with pytest.raises(ValueError, match="is not a checkpoint with a tokenizer"):
        run_read(SimpleNamespace(model=str(paths.texts), memory=paths.memory), paths.texts)
    config = Path(paths.model) / "config.json"
    config.write_text(json.dumps(LLAMA))
    with pytest.raises(ValueError, match="is a llama model, which has no memory"):
        run_read(paths, paths.texts)


def run_ask(paths, *prompts, **changes) -> None:
    options = dict(memory=paths.memory, max_new_tokens=9) | changes
    ask.main([paths.model, *(f"--prompt={x}" for x in prompts), *flags(**options)])


def continuation(paths, text: str) -> str:
    """Returns the greedy continuation of a text that is read in one call."""
    ids = ids_of(text)
    tokens = paths.net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    return byte_tokenizer().decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_a_model_that_has_just_read(paths, capsys):
    """Answers equal those after reading text and prompt in one call, and leave the files unchanged: otherwise a memory
    would answer differently from its text.
    """
    run_read(paths, paths.texts)
    before = {path.name: path.read_bytes() for path in paths.memory.iterdir()}
    prompts = ["Der König", "Zwölf Töchter hatte der", "X"]
    run_ask(paths, *prompts)
    answers = "".join(f"{prompt}{continuation(paths, whole_text(paths) + prompt)}\n" for prompt in prompts)
    assert capsys.readouterr().out == answers
    assert {path.name: path.read_bytes() for path in paths.memory.iterdir()} == before


def test_special_tokens_in_a_prompt_are_text(paths, capsys):
    """`</s>` in a prompt is text, with --keep too: otherwise it would end a document within the prompt."""
    run_read(paths, paths.texts / "a.txt")
    text = (paths.texts / "a.txt").read_text()
    run_ask(paths, SPECIAL, keep=True)
    answer = continuation(paths, text + SPECIAL)
    assert capsys.readouterr().out == f"{SPECIAL}{answer}\n"
    assert read_description(paths.memory)["tokens_seen"] == [len(ids_of(text + SPECIAL + answer)[0])]


def test_what_is_kept_is_learnt(paths, capsys):
    """--keep saves each prompt and its answer in order, in the memory: otherwise later answers would not depend on
    them.
    """
    run_read(paths, paths.texts)
    run_ask(paths, "Der König", "Zwölf", keep=True)
    text = whole_text(paths)
    for prompt in ("Der König", "Zwölf"):
        text += prompt + continuation(paths, whole_text(paths) + prompt)
    assert load(paths).layers[0].state.memory.num_seen.item() == len(ids_of(text)[0])
    run_ask(paths, "X")
    assert capsys.readouterr().out.splitlines()[-1] == "X" + continuation(paths, text + "X")
    run_read(paths, paths.texts)  # and is known to have read its texts


def test_asking_again_and_again(paths, capsys, monkeypatch):
    """Interactive prompts are answered independently: otherwise an answer would depend on the prompts before it."""
    run_read(paths, paths.texts / "a.txt")
    prompts = iter(["Der König", "Zwölf", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(prompts))
    run_ask(paths)
    text = (paths.texts / "a.txt").read_text()
    answers = [continuation(paths, text + prompt) for prompt in ("Der König", "Zwölf")]
    assert capsys.readouterr().out == "".join(f"{x}\n" for x in answers)


def test_questions_share_the_memory(paths):
    """Repeating a loaded memory for 100 questions allocates no copies: otherwise many questions would need the memory
    many times.
    """
    run_read(paths, paths.texts / "a.txt")
    cache = load(paths)
    cache.batch_repeat_interleave(100)
    for layer in cache.layers:
        for x in layer.state.tensors():
            assert (
                len(x) == 100
                and x.untyped_storage().nbytes() <= next(paths.memory.glob("*.safetensors")).stat().st_size
            )


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"temperature": -1}])
def test_bad_input_to_ask(options, paths):
    """Options out of range, an empty prompt and a missing memory raise an error that names them: otherwise a user could
    not tell which to change.
    """
    with pytest.raises(ValueError, match=f"--{next(iter(options))}"):
        run_ask(paths, "X", **options)
    with pytest.raises(ValueError, match="--prompt is empty"):
        run_ask(paths, "")
    with pytest.raises(FileNotFoundError, match="is not a memory folder"):
        run_ask(paths, "X")

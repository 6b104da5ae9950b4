"""eval/studies/loss_by_position.py: a loss counts at the position of its token, and stretches are spread evenly."""

import json
import math
from itertools import pairwise

import pytest
import torch
from byte_model import save_byte_model
from covering import in_one_test

from eval.studies import loss_by_position
from titans_hf.cli.training.tokenizer import byte_tokenizer

LENGTH = 300


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("".join(f"{i} née\n" for i in range(200)))
    (tmp_path / "books" / "two.txt").write_text("".join(f"{i} lines, " for i in range(200)))
    return tmp_path


def command(folder, *models, **options):
    arguments = [*models, "--text", folder / "books", "--output", folder / "out", "--device", "cpu"]
    options = {"length": LENGTH, "stretches": 2} | options
    loss_by_position.main([*map(str, arguments), *(f"--{name}={value}" for name, value in options.items())])


def test_bits_by_position(folder):
    """A loss counts at the position of its token, averaged over all stretches."""
    model = save_byte_model(folder / "model", "mag").eval()
    command(folder, folder / "model")
    found = json.loads((folder / "out" / "loss_by_position.json").read_text())
    assert found["edges"] == [0, 256, LENGTH]
    ids = loss_by_position.stretches_of(folder / "books", byte_tokenizer(), LENGTH, 2)
    assert ids.shape == (4, LENGTH)
    with torch.no_grad():
        log_probs = model(ids).logits.log_softmax(-1)
    bits = [[-log_probs[row, t - 1, ids[row, t]].item() / math.log(2) for row in range(4)] for t in range(1, LENGTH)]
    expected = [torch.tensor(bits[:255]).mean(), torch.tensor(bits[255:]).mean()]
    torch.testing.assert_close(torch.tensor(found["bits per token"]["model"]), torch.stack(expected))
    lines = (folder / "out" / "loss_by_position.md").read_text().splitlines()
    assert lines[0] == "| model | 0 to 256 | 256 to 300 |" and len(lines) == 3
    assert (folder / "out" / "loss_by_position.png").stat().st_size > 5_000


def test_memory_off(folder):
    """With --memory_off a Titans has a second row, of the loss of the same text without learning."""
    model = save_byte_model(folder / "model", "lmm").eval()
    command(folder, folder / "model", "--memory_off")
    found = json.loads((folder / "out" / "loss_by_position.json").read_text())["bits per token"]
    ids = loss_by_position.stretches_of(folder / "books", byte_tokenizer(), LENGTH, 2)
    model.set_memory_learning(False)
    with torch.no_grad():
        log_probs = model(ids).logits[:, 255:-1].log_softmax(-1)
    expected = -log_probs.gather(2, ids[:, 256:, None]).mean().item() / math.log(2)
    assert found["model, memory off"][1] == pytest.approx(expected, rel=1e-5)
    assert found["model"][1] != pytest.approx(expected, rel=1e-5)


def test_stretches_are_of_the_text(folder):
    """Stretches are evenly spaced parts of the text without overlap."""
    texts = [file.read_bytes() for file in sorted((folder / "books").iterdir())]
    ids = loss_by_position.stretches_of(folder / "books", byte_tokenizer(), LENGTH, 3)
    read = [bytes(row - 3 for row in rows) for rows in ids.tolist()]  # ids 0 to 2 are no bytes
    for text, parts in zip(texts, (read[:3], read[3:]), strict=True):
        places = [text.index(part) for part in parts]
        gaps = [places[0], *(b - a - LENGTH for a, b in pairwise(places))]
        gaps.append(len(text) - places[-1] - LENGTH)
        assert min(gaps) >= 0 and max(gaps) - min(gaps) < 4


@in_one_test(
    "options,message",
    [
        ({"length": 1}, "--length must be at least 2, but is 1"),
        ({"stretches": 0}, "--stretches must be at least 1, but is 0"),
        ({"length": 5_000}, r"one.txt has \d+ tokens: too few for 2 stretches of 5000"),
    ],
)
def test_bad_options(folder, options, message):
    """Options out of range raise an error that names them."""
    save_byte_model(folder / "model", "lmm")
    with pytest.raises(ValueError, match=message):
        command(folder, folder / "model", **options)


def test_nothing_to_read(folder):
    """A folder without texts raises an error."""
    save_byte_model(folder / "model", "lmm")
    for file in (folder / "books").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"holds no \.txt or \.md files"):
        command(folder, folder / "model")


def test_another_tokenizer(folder):
    """Models with different tokenizers raise an error."""
    for name in ("a", "b"):
        save_byte_model(folder / name, "lmm")
    other = byte_tokenizer()
    other.add_tokens(["whale"])
    other.save_pretrained(folder / "b")
    with pytest.raises(ValueError, match=r"b has another tokenizer than .*a: bits cannot be compared"):
        command(folder, folder / "a", folder / "b")

"""The demo: recall beyond the window depends on the memory."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from titans_hf.cli import demo


def test_batches_ask_for_what_was_told():
    """Every label is the value of a key among the facts."""
    ids, labels = demo.make_batch(5, filler=7, generator=torch.Generator().manual_seed(0))
    assert ids.shape == (5, 2 * demo.NUM_PAIRS + 7 + 2 * demo.NUM_QUERIES)
    for row, asked in zip(ids.tolist(), labels.tolist(), strict=True):
        facts = dict(zip(row[0 : 2 * demo.NUM_PAIRS : 2], row[1 : 2 * demo.NUM_PAIRS : 2], strict=True))
        assert len(facts) == demo.NUM_PAIRS
        answers = [(i, label) for i, label in enumerate(asked) if label != -100]
        assert len(answers) == demo.NUM_QUERIES
        assert all(label == row[i] == facts[row[i - 1]] for i, label in answers)


def test_runs(tmp_path):
    """The demo runs all its steps and saves its models and the picture after two steps of training."""
    results = demo.main(["--steps", "2", "--questions", "4", "--output_dir", str(tmp_path)])
    assert list(results) == ["Titans LMM", "Titans LMM, memory off", "Mistral"]
    assert {x.name for x in tmp_path.iterdir()} == {"titans-lmm", "mistral", "recall.png"}


def test_every_id_is_a_word(tmp_path):
    """The demo's tokenizer, saved and loaded, has one word for every id, and no two ids share a word."""
    demo.make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(" ".join(demo.WORDS)).input_ids == list(range(demo.VOCAB_SIZE))
    assert len(demo.NAMES) == len(demo.CITIES) == len(demo.FILLERS) == demo.NUM_SYMBOLS


@pytest.mark.slow
def test_recall_is_the_memorys(tmp_path):
    """A trained model recalls facts beyond its window, and no longer once its memory stops learning."""
    set_seed(1)
    model = AutoModelForCausalLM.from_config(demo.make_configs("mag")["Titans MAG"])
    demo.train("Titans MAG", model, steps=250, seed=1)
    model.save_pretrained(tmp_path)
    stopped = AutoModelForCausalLM.from_pretrained(tmp_path, memory_max_lr=0.0)
    assert demo.recall(model.eval(), filler=64, num_questions=100, seed=2) > 0.9
    assert demo.recall(stopped, filler=64, num_questions=100, seed=2) < 0.25

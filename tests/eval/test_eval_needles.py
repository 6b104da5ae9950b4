"""Needle samples compared with those of lm-eval's code, of which the sentence splitter and the download are
replaced.
"""

import importlib
import random
from types import SimpleNamespace

import pytest
from covering import covering

from titans_hf.cli.training.tokenizer import byte_tokenizer

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")
from titans_hf.cli.evaluation import needles

TEXT = "It was dark. Mr. Darcy came! 'Who is there?' she said. Nobody was. The wind (it blew.) fell. " * 400
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def official():
    """lm-eval's module, which sorts all keys and looks for nltk's data as it is imported."""
    words = {
        "nouns": ["act", "yak", "fashion", "zoo"],
        "adjectives": ["old", "old-fashioned", "new", "older"],
        "verbs": [],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=words))
        needles.categories.cache_clear()
        needles.word_groups.cache_clear()
        patch.setattr("nltk.data.find", lambda name: None)
        module = importlib.import_module("lm_eval.tasks.ruler.prepare_niah")
        utils = importlib.import_module("lm_eval.tasks.ruler.niah_utils")
        patch.setattr(module, "cached_sent_tokenize", needles.split_sentences)
        yield module, utils.TEMPLATE
    needles.categories.cache_clear()
    needles.word_groups.cache_clear()


@covering(1, {"size": [1, 7, 40, 333], "name": needles.KINDS})
def test_samples_are_those_of_lm_eval(official, name, size):
    """Prompts and answers equal lm-eval's for the same seed."""
    module, template = official
    kind = needles.KINDS[name]
    for seed in range(5):
        random.seed(seed)
        prompt, answers, query = module.generate_input_output(
            size,
            needles.NOISE if kind.in_noise else TEXT.split(),
            type_haystack="repeat" if kind.in_noise else "essay",
            num_needle_k=1,
            type_needle_k="words",
            num_needle_v=1,
            type_needle_v=kind.values,
            template=template,
        )
        sample = needles.make_sample(random.Random(seed), kind, size, TEXT.split())
        assert (sample["input"], sample["outputs"]) == (prompt, answers)
        assert query in sample["gen_prefix"]


def test_keys_depths_and_noise_are_those_of_lm_eval(official):
    """Keys, depths, noise, number and seed equal lm-eval's."""
    module, _ = official
    for seed in range(200):
        assert needles.draw_key(random.Random(seed)) == random.Random(seed).choice(module.WORDS)
    assert [int(depth) for depth in module.DEPTHS] == needles.DEPTHS
    assert module.get_haystack("repeat") == needles.NOISE
    assert module.NUM_SAMPLES == needles.NUM_SAMPLES
    assert module.RANDOM_SEED == needles.SEED


@pytest.mark.parametrize("name", needles.KINDS)
def test_prefix_and_length_are_what_lm_eval_writes(official, name):
    """Fields and the wording of the prefix equal lm-eval's."""
    module, template = official
    kind = needles.KINDS[name]
    (theirs,) = module.generate_samples(
        needles.NOISE if kind.in_noise else TEXT.split(),
        TOKENIZER,
        max_seq_length=8192,
        type_haystack="repeat" if kind.in_noise else "essay",
        type_needle_k="words",
        type_needle_v=kind.values,
        template=template,
        num_samples=1,
    )
    (ours,) = needles.make_samples(name, TOKENIZER, 8192, 1, TEXT)
    assert ours.keys() == theirs.keys()
    words = theirs["gen_prefix"].split(" for ")[0]
    assert ours["gen_prefix"].startswith(words)
    assert ours["gen_prefix"].split(" mentioned ")[1] == theirs["gen_prefix"].split(" mentioned ")[1]


@covering(1, {"length": [1024, 2048, 3001], "name": needles.KINDS})
def test_samples_are_as_long_as_fits(name, length):
    """A sample and its answer fill the length up to one unit of the haystack, and contain the value asked for."""
    unit = len(needles.NOISE) + 1 if needles.KINDS[name].in_noise else 12
    for sample in needles.make_samples(name, TOKENIZER, length, 6, TEXT):
        tokens = len(needles.prompt_of(sample).encode()) + needles.GENERATED_TOKENS
        assert tokens == sample["length"]
        assert length - unit < tokens <= length
        assert sample["outputs"][0] in sample["input"]


def test_samples_do_not_depend_on_their_number_and_differ():
    """The first samples are the same for any number of them, and differ by seed."""
    few = list(needles.make_samples("niah_single_1", TOKENIZER, 1024, 3))
    assert list(needles.make_samples("niah_single_1", TOKENIZER, 1024, 9))[:3] == few
    assert len({sample["outputs"][0] for sample in few}) == 3
    assert list(needles.make_samples("niah_single_1", TOKENIZER, 1024, 3, seed=1)) != few


def test_needles_lie_at_all_depths():
    """Needles occur from the start of a prompt to its end."""
    places = [s["input"].index("One of the") / 4096 for s in needles.make_samples("niah_single_1", TOKENIZER, 4096, 60)]
    assert min(places) < 0.15
    assert max(places) > 0.8


def test_too_short_a_length_says_what_it_takes():
    """A length too short for a needle raises an error with the length needed."""
    with pytest.raises(ValueError, match=r"length 300 is too short for niah_single_1.* takes \d+ tokens"):
        next(needles.make_samples("niah_single_1", TOKENIZER, 300))


def test_too_long_a_length_says_what_there_is():
    """A length beyond the available text raises an error with its number of words."""
    with pytest.raises(ValueError, match="more than the 3 words"):
        next(needles.make_samples("niah_single_2", TOKENIZER, 4096, text="only three words"))


def test_sentences_end_after_quotes_and_not_after_titles():
    """Sentences end after quotation marks and not after titles or initials."""
    assert needles.split_sentences("Mr. Darcy came. 'Why?' J. Bond saw Dr. No! Yes") == [
        "Mr. Darcy came.",
        "'Why?'",
        "J. Bond saw Dr. No!",
        "Yes",
    ]

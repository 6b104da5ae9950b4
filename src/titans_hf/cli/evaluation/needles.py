"""The single needles of RULER (niah_single_1, 2 and 3), as in lm-eval's tasks of these names, without the network.

Wording, order of random draws, depths and answers are as in lm_eval/tasks/ruler/prepare_niah.py, which cannot be
imported offline. Two things differ. A sample is as long as fits into the asked length, to the sentence of noise or the
word of a book, where RULER's size grows in steps. Sentences are split by a regular expression.
"""

import random
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from titans_hf.cli.shared.text_files import find_files

SEED = 42
NUM_SAMPLES = 500
GENERATED_TOKENS = 128
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {values} for {key} is: {value}."
PROMPT = (
    "A special magic {value_name} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {value_name} afterwards.\n{context}\n"
    "What is the special magic {value_name} for {key} mentioned in the provided text?"
)
PREFIX = "The special magic {value_name} for {key} mentioned in the provided text is"
DEPTHS = np.linspace(0, 100, num=40).round().astype(int).tolist()
# A full stop after a title or an initial ends no sentence.
SENTENCE_END = re.compile(r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[A-Z]\.)(?<=[.!?])([\"')]*)\s+")


@dataclass(frozen=True)
class Kind:
    """The kind of the hidden values (numbers or uuids), and whether they are in repeated noise or in a text."""

    values: str
    in_noise: bool = False


KINDS = {
    "niah_single_1": Kind("numbers", in_noise=True),
    "niah_single_2": Kind("numbers"),
    "niah_single_3": Kind("uuids"),
}


@cache
def word_groups() -> list[list[str]]:
    """Groups the adjectives of keys (adjective-noun of wonderwords) so that a group's keys sort before the next's."""
    groups: list[list[str]] = []
    for adjective in sorted(f"{adjective}-" for adjective in categories()["adjectives"]):
        if groups and adjective.startswith(groups[-1][0]):  # "old-fashioned-act" sorts between two of "old-"
            groups[-1].append(adjective)
        else:
            groups.append([adjective])
    return groups


def draw_key(rng: random.Random) -> str:
    """Draws a key as RULER does from the sorted list of six million, without the half gigabyte of that list."""
    nouns = categories()["nouns"]
    place = rng.randrange(len(nouns) * sum(map(len, word_groups())))
    for group in word_groups():
        if place < len(group) * len(nouns):
            # the keys of one adjective are already in order
            keys = (adjective + noun for adjective in group for noun in nouns)
            return group[0] + nouns[place] if len(group) == 1 else sorted(keys)[place]
        place -= len(group) * len(nouns)


def draw_value(rng: random.Random, kind: Kind) -> str:
    """Draws a number of seven digits, or a uuid."""
    if kind.values == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


@cache
def categories() -> dict[str, list[str]]:
    """Lists the "adjectives" and "nouns" that keys are made of, sorted. Raises ImportError without wonderwords."""
    try:
        import wonderwords
    except ImportError as error:
        raise ImportError("needles need the words of wonderwords: pip install -e '.[eval]'") from error
    words = wonderwords.RandomWord()._categories
    return {kind: sorted(set(words[kind])) for kind in ("adjectives", "nouns")}


def book_text(folder: str | Path) -> str:
    """Joins the books of a folder; every run of white space becomes one space."""
    files = find_files(folder, "the folder of the haystack")
    return " ".join(" ".join(file.read_text(encoding="utf-8").split()) for file in files)


def split_sentences(text: str) -> list[str]:
    """Splits a text where white space follows the end of a sentence."""
    return SENTENCE_END.sub(r"\1\n", text).split("\n")


def make_sample(rng: random.Random, kind: Kind, size: int, words: list[str]) -> dict:
    """Makes a sample: one needle in `size` sentences of noise, or in the first `size` words."""
    key, value = draw_key(rng), draw_value(rng, kind)
    needle = needle_of(kind, key, value)
    if kind.in_noise:
        sentences = [NOISE] * size
        sentences.insert(rng.sample(range(size), 1)[0], needle)
        context = "\n".join(sentences)
    else:
        sentences = split_sentences(" ".join(words[:size]))
        place = int(len(sentences) * (rng.sample(DEPTHS, 1)[0] / 100))
        context = " ".join([" ".join(sentences[:place]), needle, " ".join(sentences[place:])])
    return sample_of(kind, key, value, context)


def needle_of(kind: Kind, key: str, value: str) -> str:
    """Makes the sentence that is hidden."""
    return NEEDLE.format(values=kind.values, key=key, value=value)


def sample_of(kind: Kind, key: str, value: str, context: str) -> dict:
    """Makes the prompt that asks for a key, the answer, and how the reply begins, in the schema of RULER."""
    names = {"value_name": kind.values.removesuffix("s"), "key": key}
    return {
        "input": PROMPT.format(context=context, **names),
        "outputs": [value],
        "gen_prefix": PREFIX.format(**names),
    }


def token_counter(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """Makes a function that counts the tokens of a text, the special ones too."""
    return lambda text: len(tokenizer(text, verbose=False).input_ids)


def prompt_of(sample: dict) -> str:
    """Joins input and prefix as lm-eval does."""
    return f"{sample['input']} {sample['gen_prefix']}"


def largest(fits: Callable[[int], bool], start: int) -> int:
    """Finds the largest size that fits, 0 if none does: in steps that double, then halve, from a first guess."""
    size, step = max(start, 1), 1
    while size > 0 and not fits(size):
        size, step = size - step, step * 2
    size, step = max(size, 0), 1
    while fits(size + step):
        size, step = size + step, step * 2
    while step := step // 2:
        if fits(size + step):
            size += step
    return size


def make_samples(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    number: int = NUM_SAMPLES,
    text: str = "",
    seed: int = SEED,
) -> Iterator[dict]:
    """Makes `number` samples of a kind: prompt, prefix and the 128 tokens to be generated fill at most `length` tokens.

    Sample i is the same however many there are.
    """
    kind, words, count = KINDS[name], text.split(), token_counter(tokenizer)
    size = 1
    for index in range(number):
        draw = partial(_draw, f"{seed}/{length}/{index}", kind, words)

        def fits(size: int, draw=draw) -> bool:
            enough = kind.in_noise or size <= len(words)
            return enough and count(prompt_of(draw(size))) + GENERATED_TOKENS <= length

        size = largest(fits, size)
        if not size:
            raise ValueError(
                f"length {length} is too short for {name}: with the {GENERATED_TOKENS} tokens to be generated, its "
                f"shortest prompt takes {count(prompt_of(draw(1))) + GENERATED_TOKENS} tokens of this tokenizer"
            )
        if not kind.in_noise and size == len(words):
            raise ValueError(f"length {length} is more than the {len(words):,} words of the books can fill")
        sample = draw(size)
        tokens = count(prompt_of(sample)) + GENERATED_TOKENS
        yield {"index": index, **sample, "length": tokens, "max_length": length}


def _draw(seed: str, kind: Kind, words: list[str], size: int) -> dict:
    return make_sample(random.Random(seed), kind, size, words)

"""Makes the pass-key: a number hidden in noise, asked for at the end. The words are those of niah_single_1, a task of
RULER.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache

import wonderwords
from transformers import PreTrainedTokenizerBase

SEED = 42
GENERATED_TOKENS = 128
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
PROMPT = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n{context}\n"
    "What is the special magic number for {key} mentioned in the provided text? "
)
PREFIX = "The special magic number for {key} mentioned in the provided text is"


@cache
def categories() -> dict[str, list[str]]:
    """Lists the "adjectives" and "nouns" that keys are made of, sorted."""
    words = wonderwords.RandomWord()._categories
    return {kind: sorted(set(words[kind])) for kind in ("adjectives", "nouns")}


def draw_pair(rng: random.Random) -> tuple[str, str]:
    """Draws a key, an adjective and a noun, and a number of seven digits."""
    return "-".join(rng.choice(kind) for kind in categories().values()), str(rng.randint(10**6, 10**7 - 1))


def largest(fits: Callable[[int], bool], start: int) -> int:
    """Finds the largest size that fits, 0 if none above 0 does: in steps that double, then halve, from a guess."""
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


def ask(rng: random.Random, tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[str, str]:
    """Makes a prompt and its number: with the answer at most `length` tokens, to the line of noise.

    Raises ValueError where not even the needle fits.
    """
    (key, value), depth = draw_pair(rng), rng.random()

    def prompt(size: int) -> str:
        place = int(depth * (size + 1))
        context = "\n".join([*[NOISE] * place, NEEDLE.format(key=key, value=value), *[NOISE] * (size - place)])
        return PROMPT.format(context=context, key=key) + PREFIX.format(key=key)

    def num_tokens(size: int) -> int:
        return len(tokenizer(f"{prompt(size)} {value}.", verbose=False).input_ids)

    if num_tokens(0) > length:
        raise ValueError(f"length {length} is too short for a pass-key, whose shortest takes {num_tokens(0)} tokens")
    return prompt(largest(lambda size: num_tokens(size) <= length, start=length // 100)), value


def make_samples(tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> Iterator[dict[str, str]]:
    """Makes prompts ("input") and their numbers ("target"): with the tokens to be generated, at most `length` tokens.

    Sample i is the same however many there are.
    """
    for index in range(number):
        rng = random.Random(f"{SEED}/{length}/{index}")
        prompt, value = ask(rng, tokenizer, length - GENERATED_TOKENS)
        yield {"input": prompt, "target": value}

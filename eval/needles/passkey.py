"""Makes the pass-key: a number hidden in noise, asked for at the end; and training data for it, for `titans-hf train`.

    python -m eval.needles.passkey --output data/passkeys

The words are those of niah_single_1, a task of RULER. In the training data the first documents are a needle and the
beginning of the answer, then with up to three lines of noise between them. The others are prompts whose lengths rise to
`--length` tokens: without the short ones first a model learns nothing. In a fifth of the documents the noise is the
task's own, one repeated line. In the others it is lines of random words; a document repeats a few lines or draws all
anew. A model trained on the one line alone loses the needle among other lines.
"""

import argparse
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import wonderwords
from datasets import Dataset, DatasetDict
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.text_ids import encode
from titans_hf.cli.training.tokenizer import load_tokenizer

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
SHORT_DOCUMENT_SHARE = 0.2  # share of documents that are no prompts of the task yet
RISING_LENGTH_SHARE = 0.2  # share of documents while lengths rise
TASK_NOISE_SHARE = 0.2  # share of documents with the task's own noise
NUM_NOISE_LINES = (1, 2, 4, 64)  # lines of random words in a document
MAX_WORD_LETTERS = 7
NUM_VALIDATION_DOCUMENTS = 128

Document = tuple[str, str]  # a prompt and its completion


@cache
def categories() -> dict[str, list[str]]:
    """Lists the "adjectives" and "nouns" that keys are made of, sorted."""
    words = wonderwords.RandomWord()._categories
    return {kind: sorted(set(words[kind])) for kind in ("adjectives", "nouns")}


@cache
def words() -> list[str]:
    """Lists the words that lines of noise are made of."""
    return [w for kind in categories().values() for w in kind if len(w) <= MAX_WORD_LETTERS and w.isalpha()]


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


def task_document(
    rng: random.Random, tokenizer: PreTrainedTokenizerBase, length: int, endless: Iterator[str]
) -> Document:
    """Makes a prompt and its answer: at most `length` tokens, to the line of endless noise.

    Raises ValueError where not even the needle fits.
    """
    (key, value), depth, lines = draw_pair(rng), rng.random(), []

    def document(size: int) -> Document:
        lines.extend(itertools.islice(endless, max(0, size - len(lines))))
        place = int(depth * (size + 1))
        context = "\n".join([*lines[:place], NEEDLE.format(key=key, value=value), *lines[place:size]])
        return PROMPT.format(context=context, key=key) + PREFIX.format(key=key), f" {value}."

    def num_tokens(size: int) -> int:
        return len(tokenizer("".join(document(size)), verbose=False).input_ids)

    if num_tokens(0) > length:
        raise ValueError(f"length {length} is too short for a pass-key, whose shortest takes {num_tokens(0)} tokens")
    return document(largest(lambda size: num_tokens(size) <= length, start=length // 100))


def make_samples(tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> Iterator[dict[str, str]]:
    """Makes prompts ("input") and their numbers ("target"): with the tokens to be generated, at most `length` tokens.

    Sample i is the same however many there are.
    """
    for index in range(number):
        rng = random.Random(f"{SEED}/{length}/{index}")
        prompt, answer = task_document(rng, tokenizer, length - GENERATED_TOKENS, itertools.repeat(NOISE))
        yield {"input": prompt, "target": answer.strip(" .")}


def noise(rng: random.Random) -> Iterator[str]:
    """Yields the lines of a document, without end."""
    lines = [NOISE]
    if rng.random() >= TASK_NOISE_SHARE:
        lines = [random_line(rng) for _ in range(rng.choice(NUM_NOISE_LINES))]
    while True:
        yield rng.choice(lines)


def random_line(rng: random.Random) -> str:
    """Draws one to eight sentences of one to four words."""
    sentences = (" ".join(rng.choices(words(), k=rng.randint(1, 4))) for _ in range(rng.randint(1, 8)))
    return " ".join(f"{sentence.capitalize()}." for sentence in sentences)


def short_document(rng: random.Random, num_lines: int) -> Document:
    """Makes a document of a needle, noise, and the beginning of the answer."""
    key, value = draw_pair(rng)
    lines = [NEEDLE.format(key=key, value=value), *itertools.islice(noise(rng), num_lines), PREFIX.format(key=key)]
    return "\n".join(lines), f" {value}."


def curriculum(rng: random.Random, tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> Iterator[Document]:
    """Yields `number` documents of at most `length` tokens, in the order in which they are to be learnt from.

    Raises ValueError for a length that a pass-key does not fit into.
    """
    longest_words = {"key": "-".join(max(kind, key=len) for kind in categories().values()), "value": "9" * 7}
    text = PROMPT.format(context=NEEDLE, key="{key}") + PREFIX + " {value}."
    shortest = len(tokenizer(text.format(**longest_words)).input_ids)
    if length < shortest:
        raise ValueError(f"--length {length}: the shortest documents take up to {shortest} tokens of this tokenizer")
    for index in tqdm(range(number), desc="writing documents"):
        progress = index / number
        if progress < SHORT_DOCUMENT_SHARE:
            yield short_document(rng, rng.randint(0, max(0, int(8 * progress / SHORT_DOCUMENT_SHARE) - 4)))
        else:
            longest = shortest + (length - shortest) * min(1.0, (progress - SHORT_DOCUMENT_SHARE) / RISING_LENGTH_SHARE)
            size = rng.randint(max(shortest, int(shortest + longest) // 2), int(longest))
            yield task_document(rng, tokenizer, size, noise(rng))


def table(documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Makes a data set of prompts and completions, with the tokens and the labels that titans-hf train takes: the
    completion and its eos alone are learnt.
    """
    rows = []
    for prompt, completion in documents:
        asked, answer = (list(encode(tokenizer, text)["input_ids"]) for text in (prompt, completion))
        answer.append(tokenizer.eos_token_id)
        tokens = {"input_ids": asked + answer, "labels": [-100] * len(asked) + answer}
        rows.append({"prompt": prompt, "completion": completion, **tokens})
    return Dataset.from_list(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a new folder, for titans-hf train --train_data")
    parser.add_argument("--number", type=int, default=33_280, help="documents to train on")
    parser.add_argument("--length", type=int, default=1023, help="tokens of the longest document, without an eos")
    parser.add_argument("--tokenizer", default="bytes", help="the word bytes, or the folder of a tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    check_minimums(args, number=1, seed=0)
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists")
    rng, tokenizer = random.Random(args.seed), load_tokenizer(args.tokenizer)
    train = table(curriculum(rng, tokenizer, args.length, args.number), tokenizer)
    of_the_task = itertools.repeat(NOISE)
    asked = (task_document(rng, tokenizer, args.length, of_the_task) for _ in range(NUM_VALIDATION_DOCUMENTS))
    DatasetDict(train=train, validation=table(asked, tokenizer)).save_to_disk(args.output)


if __name__ == "__main__":
    run_command(main)

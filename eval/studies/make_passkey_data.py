"""Makes training data for the pass-key needle: prompts and completions, from short to long, for titans-hf train.

    python -m eval.studies.make_passkey_data --output data/passkeys

The first documents are a needle and the beginning of the answer, then with up to three lines of noise between them. The
others are prompts of niah_single_1, whose lengths rise to `--length` tokens: without the short ones first a model
learns nothing. In a fifth of the documents the noise is the task's own, one repeated line. In the others it is lines of
random words; a document repeats a few lines or draws all anew. A model trained on the one line alone loses the
needle among other lines.
"""

import argparse
import contextlib
import itertools
import random
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from datasets import Dataset, DatasetDict
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from titans_hf.cli.evaluation.needles import (
    KINDS,
    NOISE,
    categories,
    draw_key,
    draw_value,
    largest,
    needle_of,
    prompt_of,
    sample_of,
    token_counter,
)
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.text_files import find_files, read_text
from titans_hf.cli.shared.text_ids import encode
from titans_hf.cli.training.tokenizer import load_tokenizer

PASSKEY = KINDS["niah_single_1"]
SHORT_DOCUMENT_SHARE = 0.2  # share of documents that are no prompts of the task yet
RISING_LENGTH_SHARE = 0.2  # share of documents while lengths rise
BOOK_NOISE_SHARE = 0.5  # share of documents with lines of books, where there are some
TASK_NOISE_SHARE = 0.2  # share of documents with the task's own noise
NUM_NOISE_LINES = (1, 2, 4, 64)  # lines of random words in a document
MAX_WORD_LETTERS = 7
MAX_LINE_CHARACTERS = 80  # of a book, in characters
NUM_VALIDATION_DOCUMENTS = 128

Document = tuple[str, str]  # a prompt and its completion


@cache
def words() -> list[str]:
    """Lists the words that lines of noise are made of."""
    return [w for kind in categories().values() for w in kind if len(w) <= MAX_WORD_LETTERS and w.isalpha()]


def random_line(rng: random.Random) -> str:
    """Draws one to eight sentences of one to four words."""
    sentences = (" ".join(rng.choices(words(), k=rng.randint(1, 4))) for _ in range(rng.randint(1, 8)))
    return " ".join(f"{sentence.capitalize()}." for sentence in sentences)


def noise(rng: random.Random, books: Sequence[str] = ()) -> Iterator[str]:
    """Yields the lines of a document, without end. Half of the documents have lines of books, from anywhere on."""
    if books and rng.random() < BOOK_NOISE_SHARE:
        yield from (books[i % len(books)] for i in itertools.count(rng.randrange(len(books))))
    of_the_task = rng.random() < TASK_NOISE_SHARE
    lines = [NOISE] if of_the_task else [random_line(rng) for _ in range(rng.choice(NUM_NOISE_LINES))]
    while True:
        yield rng.choice(lines)


def short_document(rng: random.Random, num_lines: int, endless: Iterator[str]) -> Document:
    """Makes a document of a needle, noise, and the beginning of the answer."""
    key, value = draw_key(rng), draw_value(rng, PASSKEY)
    lines = [needle_of(PASSKEY, key, value), *itertools.islice(endless, num_lines)]
    return "\n".join([*lines, sample_of(PASSKEY, key, value, context="")["gen_prefix"]]), f" {value}."


def task_document(
    rng: random.Random, tokenizer: PreTrainedTokenizerBase, length: int, endless: Iterator[str]
) -> Document:
    """Makes a prompt as niah_single_1 puts it, and the answer: at most `length` tokens, to the line of endless noise.

    Raises ValueError where not even the needle fits.
    """
    key, value, depth = draw_key(rng), draw_value(rng, PASSKEY), rng.random()
    lines, count = [], token_counter(tokenizer)

    def document(size: int) -> Document:
        lines.extend(itertools.islice(endless, max(0, size - len(lines))))
        place = int(depth * (size + 1))
        context = "\n".join([*lines[:place], needle_of(PASSKEY, key, value), *lines[place:size]])
        return prompt_of(sample_of(PASSKEY, key, value, context)), f" {value}."

    def fits(size: int) -> bool:
        return count("".join(document(size))) <= length

    if not fits(0):
        raise ValueError(f"length {length} is too short for a pass-key")
    return document(largest(fits, start=length // 100))


def shortest_length(tokenizer: PreTrainedTokenizerBase) -> int:
    """Finds a number of tokens that any key's shortest document fits into."""
    for length in itertools.count(64, step=64):
        with contextlib.suppress(ValueError):
            task_document(random.Random(0), tokenizer, length, noise(random.Random(0)))
            return length + 64


def curriculum(
    rng: random.Random, tokenizer: PreTrainedTokenizerBase, length: int, number: int, books: Sequence[str] = ()
) -> Iterator[Document]:
    """Yields `number` documents of at most `length` tokens, in the order in which they are to be learnt from.

    Raises ValueError for a length that a pass-key does not fit into.
    """
    shortest = shortest_length(tokenizer)
    if length < shortest:
        raise ValueError(f"--length {length}: the shortest documents take up to {shortest} tokens of this tokenizer")
    for index in tqdm(range(number), desc="writing documents"):
        progress = index / number
        if progress < SHORT_DOCUMENT_SHARE:
            yield short_document(
                rng, rng.randint(0, max(0, int(8 * progress / SHORT_DOCUMENT_SHARE) - 4)), noise(rng, books)
            )
        else:
            longest = shortest + (length - shortest) * min(1.0, (progress - SHORT_DOCUMENT_SHARE) / RISING_LENGTH_SHARE)
            size = rng.randint(int(shortest + longest) // 2, int(longest))
            yield task_document(rng, tokenizer, size, noise(rng, books))


def read_lines(folder: Path | None) -> list[str]:
    """Reads the lines of all books of a folder, long ones broken; none without a folder."""
    files = [] if folder is None else find_files(folder, "--text")
    lines = (line for file in files for line in read_text(file, "--text").splitlines())
    return [part for line in lines for part in textwrap.wrap(line, MAX_LINE_CHARACTERS)]


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
    parser.add_argument("--text", type=Path, help="a folder of .txt files: half of the documents have lines of these")
    parser.add_argument("--tokenizer", default="bytes", help="the word bytes, or the folder of a tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    check_minimums(args, number=1, seed=0)
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists")
    rng, tokenizer = random.Random(args.seed), load_tokenizer(args.tokenizer)
    train = table(curriculum(rng, tokenizer, args.length, args.number, read_lines(args.text)), tokenizer)
    of_the_task = itertools.repeat(NOISE)
    asked = (task_document(rng, tokenizer, args.length, of_the_task) for _ in range(NUM_VALIDATION_DOCUMENTS))
    validation = table(asked, tokenizer)
    DatasetDict(train=train, validation=validation).save_to_disk(args.output)


if __name__ == "__main__":
    run_command(main)

"""Training data for the pass-key needle: prompts and completions, from short to long, for scripts/train.py.

    python eval/passkeys.py --output data/passkeys

The first ones are a needle and the beginning of the answer, then with up to three sentences of noise between them. The
others are prompts of niah_single_1, whose lengths rise to `--length` tokens: a model that has to look for something
hundreds of tokens back before it can look things up at all learns nothing.
"""

import argparse
import contextlib
import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from datasets import Dataset, DatasetDict
from needles import KINDS, NEEDLE, NOISE, PREFIX, draw_key, draw_value, passkey_document
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from training_data import load_tokenizer

SHORT = 0.5  # share of documents that are no prompts of the task yet
RISING = 0.3  # share of documents while lengths rise
EVALUATED = 128

Document = tuple[str, str]  # a prompt and its completion


def short_document(rng: random.Random, num_sentences: int) -> Document:
    """A needle, noise, and the beginning of the answer."""
    key, value = draw_key(rng), draw_value(rng, KINDS["niah_single_1"])
    needle = NEEDLE.format(values="numbers", key=key, value=value)
    return "\n".join([needle, *[NOISE] * num_sentences, PREFIX.format(value_name="number", key=key)]), f" {value}."


def shortest_length(tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that any key's shortest document fits into."""
    for length in itertools.count(64, step=64):
        with contextlib.suppress(ValueError):
            passkey_document(random.Random(0), tokenizer, length)
            return length + 64


def curriculum(rng: random.Random, tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> Iterator[Document]:
    """`number` documents of at most `length` tokens, in the order in which they are to be learnt from."""
    shortest = shortest_length(tokenizer)
    if length < shortest:
        raise ValueError(f"--length {length}: the shortest documents take up to {shortest} tokens of this tokenizer")
    for index in tqdm(range(number), desc="writing documents"):
        progress = index / number
        if progress < SHORT:
            yield short_document(rng, rng.randint(0, max(0, int(8 * progress / SHORT) - 4)))
        else:
            longest = shortest + (length - shortest) * min(1.0, (progress - SHORT) / RISING)
            yield passkey_document(rng, tokenizer, rng.randint(shortest, int(longest)))


def table(documents: Iterable[Document]) -> Dataset:
    prompts, completions = zip(*documents, strict=True)
    return Dataset.from_dict({"prompt": prompts, "completion": completions})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a new folder, for scripts/train.py --train_data")
    parser.add_argument("--number", type=int, default=32_000, help="documents to train on")
    parser.add_argument("--length", type=int, default=1023, help="tokens of the longest, without an eos")
    parser.add_argument("--tokenizer", default="bytes", help="the word bytes, or the folder of a tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists")
    rng, tokenizer = random.Random(args.seed), load_tokenizer(args.tokenizer)
    train = table(curriculum(rng, tokenizer, args.length, args.number))
    validation = table(passkey_document(rng, tokenizer, args.length) for _ in range(EVALUATED))
    DatasetDict(train=train, validation=validation).save_to_disk(args.output)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error

"""Scores texts by counting: a Kneser-Ney 4-gram of the training texts, and a cache of the text's own n-grams.

    python -m eval.language.counted --train_text DIR --choice_text DIR --score_text DIR [DIR ...] --output DIR

It reads the blocks that `train_and_score` trains on and scores the stretches that it scores, by position, so that
`compare_runs` sets both side by side. Two records are written: `ngram`, and `ngram-cache`, which mixes

    p(w | h) = a_4 p_KN(w | h) + sum_{n=1..3} a_n c_n(h w) / c_n(h)        c_n: counts in the text up to the word

with the shares a chosen on the choice texts alone, by expectation maximisation, once for each number of contexts that
the text has seen. Kneser-Ney: Kneser and Ney 1995, interpolated; one discount an order, n_1 / (n_1 + 2 n_2).
"""

import argparse
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from eval.common.records import append_record, describe_commit
from eval.language.token_blocks import cut_blocks, cut_stretches, make_tokenizer, read_documents
from eval.language.train_and_score import edges_to, scores
from eval.language.training_loop import random_batches
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.text_files import find_files

ORDER, CACHE_ORDER = 4, 3


def windows(rows: np.ndarray, order: int, base: int) -> np.ndarray:
    """Codes the n-gram that ends at each token of rows (R, T) as one number: (R, T - order + 1)."""
    codes = np.zeros((len(rows), rows.shape[1] - order + 1), dtype=np.int64)
    for i in range(order):
        codes = codes * base + rows[:, i : rows.shape[1] - order + 1 + i]
    return codes


class KneserNey:
    """Interpolated Kneser-Ney: the highest order counts n-grams, a lower one the words that an n-gram has followed."""

    def __init__(self, blocks: np.ndarray, vocab_size: int):
        self.base, self.tables = vocab_size, []
        grams, counts = np.unique(windows(blocks, ORDER, vocab_size), return_counts=True)
        for order in range(ORDER, 0, -1):
            once, twice = (counts == 1).sum(), (counts == 2).sum()
            contexts, starts = np.unique(grams // vocab_size, return_index=True)
            totals, kinds = np.add.reduceat(counts, starts), np.diff([*starts, len(grams)])
            self.tables.insert(0, (grams, counts, contexts, totals, kinds, once / max(once + 2 * twice, 1)))
            # continuation counts: in how many ways the n-gram without its first word is continued to the left
            grams, counts = np.unique(grams % vocab_size ** (order - 1), return_counts=True)

    def probabilities(self, stretches: np.ndarray) -> np.ndarray:
        """Computes p(word | the words before it) of every word but the first: (R, T + 1) ids -> (R, T)."""
        p = np.full((len(stretches), stretches.shape[1] - 1), 1 / self.base)
        for order, (grams, counts, contexts, totals, kinds, discount) in enumerate(self.tables, 1):
            if order > stretches.shape[1]:
                break
            codes = windows(stretches, order, self.base)[:, -p.shape[1] :]
            first = p.shape[1] - codes.shape[1]  # a word without enough words before it keeps the lower order
            count, total, kind = _lookup(codes, grams, counts), *_lookup(codes // self.base, contexts, totals, kinds)
            seen, lower = total > 0, p[:, first:]
            mixed = (np.maximum(count - discount, 0) + discount * kind * lower) / np.maximum(total, 1)
            p[:, first:] = np.where(seen, mixed, lower)
        return p


def _lookup(codes: np.ndarray, keys: np.ndarray, *values: np.ndarray):
    """Returns the values of codes among sorted keys, 0 for codes that are not there."""
    places = np.searchsorted(keys, codes).clip(max=len(keys) - 1)
    found = [np.where(keys[places] == codes, value[places], 0) for value in values]
    return found[0] if len(found) == 1 else found


def cache_probabilities(ids: np.ndarray) -> np.ndarray:
    """Computes c_n(h w) / c_n(h) of each word of (T + 1,) ids for n = 1, 2, 3; nan where h is new: (T, CACHE_ORDER)."""
    counts = [defaultdict(Counter) for _ in range(CACHE_ORDER)]
    words, p = ids.tolist(), np.full((len(ids) - 1, CACHE_ORDER), np.nan)
    for t, word in enumerate(words):
        for n in range(min(CACHE_ORDER, t + 1)):
            seen = counts[n][tuple(words[t - n : t])]
            if t and seen:
                p[t - 1, n] = seen[word] / seen.total()
            seen[word] += 1
    return p


class Shares:
    """The shares of the mixture, by how many of its models know anything, as a count cache whose context is not new."""

    def __init__(self, parts: np.ndarray, iterations: int = 50):
        """Chooses them on parts (..., models), the probabilities that each model gave; nan: it knows nothing."""
        parts = parts.reshape(-1, parts.shape[-1])
        self.shares, kinds = {}, (~np.isnan(parts)).sum(1)
        for kind in np.unique(kinds):
            chosen = np.nan_to_num(parts[kinds == kind])
            shares = np.full(parts.shape[1], 1 / kind) * (chosen.sum(0) > 0)
            for _ in range(iterations):
                mixed = shares * chosen
                shares = (mixed / mixed.sum(1, keepdims=True)).mean(0)
            self.shares[int(kind)] = shares

    def mix(self, parts: np.ndarray) -> np.ndarray:
        """Computes the mixture of parts (..., models): (...)."""
        kinds = (~np.isnan(parts)).sum(-1)
        shares = np.zeros(parts.shape)
        for kind in np.unique(kinds):
            shares[kinds == kind] = self.shares[int(kind)]
        return (np.nan_to_num(parts) * shares).sum(-1)


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the texts that a mixture is chosen on and scored on."""
    parser.add_argument("--train_text", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--choice_text", type=Path, required=True, help="a folder; the shares are chosen on it")
    parser.add_argument("--score_text", type=Path, nargs="+", required=True, help="folders of .txt files")
    parser.add_argument("--output", type=Path, required=True, help="the JSON Lines file that gets a line for each row")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the blocks, as in train_and_score")
    parser.add_argument("--score_length", type=int, default=16384)
    parser.add_argument("--stretches", type=int, default=2, help="stretches of each text to be scored")
    parser.add_argument("--cache", type=Path, default=Path("runs/language"), help="for the tokenizer and token ids")


def read_stretches(folders: list[Path], tokenizer: Tokenizer, args: argparse.Namespace) -> tuple[list[str], np.ndarray]:
    """Returns the name of the text of each stretch, and ids (N, T + 1)."""
    names, stretches = [], []
    for folder in folders:
        files = find_files(folder, "--score_text")
        documents = read_documents(files, tokenizer, args.cache)
        names += [file.stem for file in files for _ in range(args.stretches)]
        stretches.append(cut_stretches(documents, args.score_length, args.stretches))
    return names, np.concatenate(stretches)


def write_row(about: dict, p: np.ndarray, names: list[str], start: float, output: Path) -> None:
    """Writes the record of a row: the losses by position of p (N, T), what it gave the words of the stretches."""
    losses = np.stack([-np.log(p[:, low:high]).mean(1) for low, high in pairwise(edges_to(p.shape[1]))], axis=1)
    record = {"benchmark": "language"} | about | {"commit": describe_commit()}
    record |= {"minutes": round((time.time() - start) / 60, 1)} | scores(losses, names, p.shape[1])
    append_record(record, output)
    print(about["name"], " ".join(f"{x:.4f}" for x in record["mean"]), flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_text_options(parser)
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--block_length", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=8000, help="number of training blocks: 8,000 are 16.4M tokens")
    args = parser.parse_args(argv)
    train_files = find_files(args.train_text, "--train_text")
    tokenizer = make_tokenizer(train_files, args.vocab_size, args.cache)
    blocks = cut_blocks(read_documents(train_files, tokenizer, args.cache), args.block_length)
    start, order = time.time(), next(random_batches(len(blocks), min(args.blocks, len(blocks)), args.seed))
    model = KneserNey(blocks[order.numpy()], args.vocab_size)

    def parts_of(stretches: np.ndarray) -> np.ndarray:
        cached = np.stack([cache_probabilities(ids) for ids in stretches])
        return np.concatenate([model.probabilities(stretches)[..., None], cached], axis=-1)

    shares = Shares(parts_of(read_stretches([args.choice_text], tokenizer, args)[1]))
    names, stretches = read_stretches(args.score_text, tokenizer, args)
    parts = parts_of(stretches)
    grams = sum(len(table[0]) for table in model.tables)
    sizes = {name: getattr(args, name) for name in ("vocab_size", "blocks", "block_length", "seed")}
    for label, p in (("ngram", parts[..., 0]), ("ngram-cache", shares.mix(parts))):
        about = {"name": label, "model": label, "parameters": grams, "training": sizes}
        write_row(about, p, names, start, args.output)


if __name__ == "__main__":
    run_command(main)

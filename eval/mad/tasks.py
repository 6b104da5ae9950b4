"""The six synthetic tasks of MAD, written from their description (Poli et al. 2024, arXiv 2403.17844, section 3).

A task makes sequences and the labels of their positions: `labels[:, t]` belongs to the output at token t,
and IGNORED marks positions that do not count. The settings are the baseline of each task.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np

from eval.common.harness import IGNORED


class Sequences(NamedTuple):
    """Token ids and labels, both (N, T) int64."""

    input_ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Settings:
    """The settings that make a task easy or hard: sizes in tokens, `noise` as a share of the sequence."""

    vocab_size: int = 16
    length: int = 128
    train_sequences: int = 12_800
    noise: float = 0.0
    noise_vocab_size: int = 0
    motif: int = 1
    to_copy: int = 0


class Task(NamedTuple):
    """A task: `make(rng, settings, N, scored)` draws N sequences; `scored` labels only the positions that the accuracy
    counts.
    """

    make: Callable[[np.random.Generator, Settings, int, bool], Sequences]
    settings: Settings
    auto_encoder: bool = False


def recall(rng: np.random.Generator, settings: Settings, number: int, scored: bool) -> Sequences:
    """Draws key-value pairs with a map of their own per sequence, and noise tokens between the pairs.

    Half of the vocabulary without noise are keys, half values; the noise has ids of its own above them. Every next
    token is a label in training; scored are the values of keys that the sequence has shown before.
    """
    size, symbols = settings.length + 1, (settings.vocab_size - settings.noise_vocab_size) // 2
    num_noise = round(settings.noise * size)
    pairs = -(-(size - num_noise) // 2)
    keys = rng.integers(symbols, size=(number, pairs))
    value_of = symbols + rng.integers(symbols, size=(number, symbols))
    values = np.take_along_axis(value_of, keys, 1)
    noise = 2 * symbols + rng.integers(max(1, settings.noise_vocab_size), size=(number, num_noise))
    is_pair = rng.permuted(np.tile(np.arange(pairs + num_noise) < pairs, (number, 1)), axis=1)
    first, second = (np.zeros(is_pair.shape, np.int64) for _ in range(2))
    first[is_pair], first[~is_pair], second[is_pair] = keys.ravel(), noise.ravel(), values.ravel()
    asked = np.zeros(is_pair.shape, bool)
    asked[is_pair] = repeats(keys).ravel()
    present = np.stack([np.ones_like(is_pair), is_pair], 2)
    tokens = np.stack([first, second], 2)[present].reshape(number, -1)[:, :size]
    asked = np.stack([np.zeros_like(asked), asked], 2)[present].reshape(number, -1)[:, :size]
    return next_tokens(tokens, asked if scored else np.ones_like(asked))


def repeats(keys: np.ndarray) -> np.ndarray:
    """Marks the keys (N, P) that their row has had before: (N, P) bool."""
    order = np.argsort(keys, axis=1, kind="stable")
    ordered = np.take_along_axis(keys, order, 1)
    again = np.zeros(keys.shape, bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], 1)
    return again


def next_tokens(tokens: np.ndarray, counted: np.ndarray) -> Sequences:
    """Makes inputs and labels of tokens (N, T + 1): the next tokens, where those are counted."""
    return Sequences(tokens[:, :-1].copy(), np.where(counted, tokens, IGNORED)[:, 1:])


def fuzzy_recall(rng: np.random.Generator, settings: Settings, number: int, scored: bool) -> Sequences:
    """Draws recall whose keys and values have 1 to `motif` different tokens; when scored, keys have `motif`.

    The last pair repeats an earlier one. The front is padded with the last id of the vocabulary.
    """
    size, pad = settings.length + 1, settings.vocab_size - 1
    keys = motifs(np.arange(pad // 2), settings.motif)
    values = motifs(np.arange(pad // 2, pad), settings.motif)
    longest = 2 * settings.motif
    if size <= 2 * longest:
        raise ValueError(f"length must be at least four times motif ({settings.motif}), but is {settings.length}")
    smallest = settings.motif + 1 if scored else 2
    rows = np.arange(number)
    key = draw_motifs(rng, keys, (number, size // smallest), settings.motif if scored else 1)
    value_of = draw_motifs(rng, values, (number, len(keys)), 1)
    lengths = np.count_nonzero(keys >= 0, 1)[key] + np.count_nonzero(values >= 0, 1)[value_of[rows[:, None], key]]
    last = np.count_nonzero(np.cumsum(lengths, 1) <= size - longest, 1)
    key[rows, last] = key[rows, rng.integers(last)]
    tokens = np.concatenate([keys[key], values[value_of[rows[:, None], key]]], 2)
    present = (tokens >= 0) & (np.arange(key.shape[1]) <= last[:, None])[..., None]
    asked = np.broadcast_to(repeats(key)[..., None], present.shape) & (np.arange(longest) >= settings.motif)
    place = np.arange(size) >= size - np.count_nonzero(present, (1, 2))[:, None]
    filled, counted = np.full((number, size), pad), np.zeros((number, size), bool)
    filled[place], counted[place] = tokens[present], asked[present]
    return next_tokens(filled, counted if scored else place)


def motifs(tokens: np.ndarray, longest: int) -> np.ndarray:
    """Lists every order of 1 to `longest` different tokens, as rows (M, longest) filled up with -1."""
    rows = [row + (-1,) * (longest - n) for n in range(1, longest + 1) for row in permutations(tokens.tolist(), n)]
    return np.array(rows)


def draw_motifs(rng: np.random.Generator, table: np.ndarray, shape: tuple[int, int], shortest: int) -> np.ndarray:
    """Draws rows of a table of motifs: first a number of tokens from `shortest` on, then a motif of that number."""
    counts = np.bincount(np.count_nonzero(table >= 0, 1))
    starts = np.cumsum(counts) - counts
    sizes = rng.integers(shortest, len(counts), size=shape)
    return starts[sizes] + (rng.random(shape) * counts[sizes]).astype(np.int64)


def selective_copying(rng: np.random.Generator, settings: Settings, number: int, scored: bool) -> Sequences:
    """Draws `to_copy` tokens at random places among blanks, a marker, and as many blanks, where they are the labels."""
    blank, marker, count = settings.vocab_size - 2, settings.vocab_size - 1, settings.to_copy
    before = settings.length - count - 1
    if before < count:
        raise ValueError(f"length must be above twice to_copy ({count}), but is {settings.length}")
    content = rng.integers(blank, size=(number, count))
    inputs = np.full((number, settings.length), blank)
    labels = np.full_like(inputs, IGNORED)
    places = np.sort(rng.permuted(np.tile(np.arange(before), (number, 1)), axis=1)[:, :count], 1)
    np.put_along_axis(inputs, places, content, 1)
    inputs[:, before], labels[:, before + 1 :] = marker, content
    return Sequences(inputs, labels)


def compression(rng: np.random.Generator, settings: Settings, number: int, scored: bool) -> Sequences:
    """Draws random tokens and, last, the token whose output they are all to be decoded from."""
    inputs = rng.integers(settings.vocab_size - 1, size=(number, settings.length))
    labels = inputs.copy()
    inputs[:, -1], labels[:, -1] = settings.vocab_size - 1, IGNORED
    return Sequences(inputs, labels)


def memorization(rng: np.random.Generator, settings: Settings, number: int, scored: bool) -> Sequences:
    """Draws keys, each followed by one and the same token, where the key's value is the label; one map for all."""
    symbols, insert = (settings.vocab_size - 1) // 2, settings.vocab_size - 1
    value_of = symbols + np.random.default_rng(0).permutation(symbols)
    keys = rng.integers(symbols, size=(number, settings.length // 2))
    inputs = np.stack([keys, np.full_like(keys, insert)], 2).reshape(number, -1)
    labels = np.stack([np.full_like(keys, IGNORED), value_of[keys]], 2).reshape(number, -1)
    return Sequences(inputs, labels)


TASKS = {
    "recall": Task(recall, Settings()),
    "fuzzy-recall": Task(fuzzy_recall, Settings(motif=3)),
    "noisy-recall": Task(recall, Settings(vocab_size=32, noise=0.2, noise_vocab_size=16)),
    "selective-copying": Task(selective_copying, Settings(length=256, to_copy=16)),
    "compression": Task(compression, Settings(length=32), auto_encoder=True),
    "memorization": Task(memorization, Settings(vocab_size=256, length=32, train_sequences=256)),
}

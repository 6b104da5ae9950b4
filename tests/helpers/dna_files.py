"""Files of DNA sequences for tests."""

from pathlib import Path

import numpy as np

SHARES = {"negative": (0.55, 0.15, 0.15, 0.15), "positive": (0.15, 0.55, 0.15, 0.15)}  # rich in A, and in C


def random_text(generator: np.random.Generator, length: int, shares: tuple[float, ...] = (0.25,) * 4) -> str:
    """Draws A, C, G and T with their shares."""
    return "".join(generator.choice(list("ACGT"), length, p=shares))


def random_rows(number: int, length: int, seed: int) -> list[tuple[str, str]]:
    """Draws sequences of the two classes in turn, with their labels."""
    generator = np.random.default_rng(seed)
    return [(random_text(generator, length, SHARES[x]), x) for _ in range(number // 2) for x in SHARES]


def write_table(path: Path, number: int = 60, length: int = 40, seed: int = 0) -> Path:
    """Writes a .tsv or .csv file and returns the path."""
    separator = "," if path.suffix == ".csv" else "\t"
    rows = [("seq", "label"), *random_rows(number, length, seed)]
    path.write_text("".join(f"{text}{separator}{label}\n" for text, label in rows))
    return path

"""Files of DNA sequences for tests."""

from pathlib import Path

import numpy as np


def random_text(generator: np.random.Generator, length: int, shares: tuple[float, ...] = (0.25,) * 4) -> str:
    """Draws A, C, G and T with their shares."""
    return "".join(generator.choice(list("ACGT"), length, p=shares))


def write_table(path: Path, number: int = 60, length: int = 40, seed: int = 0) -> Path:
    """Writes sequences of two classes, rich in A and in C, in turn, and returns the path."""
    generator = np.random.default_rng(seed)
    shares = {"poor": (0.55, 0.15, 0.15, 0.15), "rich": (0.15, 0.55, 0.15, 0.15)}
    rows = [(random_text(generator, length, shares[label]), label) for _ in range(number // 2) for label in shares]
    path.write_text("seq\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    return path

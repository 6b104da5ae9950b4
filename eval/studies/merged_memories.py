"""Measures the recall of merged memories, with a model of scripts/demo.py.

    python scripts/demo.py && python -m eval.studies.merged_memories runs/demo/titans-lmm

Every text has six key-value pairs, all keys different, and filler. One memory reads all texts, one after the other;
other memories read one text each and are merged into their mean by `TitansCache.merge`. Then all values are asked for.
"""

import argparse
import copy
import json

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from titans_hf import TitansCache
from titans_hf.cli.demo import NUM_PAIRS, NUM_SYMBOLS
from titans_hf.cli.shared.checkpoints import load_model
from titans_hf.cli.shared.command_line import HelpFormatter, run_command

NUM_ROWS = 128


def make_texts(number: int, filler: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Draws `number` texts: facts (B, pairs, 2), and all their ids (B, 2 * pairs + filler)."""
    keys = torch.rand(NUM_ROWS, NUM_SYMBOLS, generator=generator).argsort(1)
    values = torch.rand(NUM_ROWS, NUM_SYMBOLS, generator=generator).argsort(1) + NUM_SYMBOLS
    texts = []
    for facts in torch.stack([keys, values], dim=-1).split(NUM_PAIRS, dim=1)[:number]:
        noise = torch.randint(2 * NUM_SYMBOLS, 3 * NUM_SYMBOLS, (NUM_ROWS, filler), generator=generator)
        texts.append((facts, torch.cat([facts.flatten(1), noise], dim=1)))
    return texts


def read(model: PreTrainedModel, ids: Tensor, cache: TitansCache | None = None) -> TitansCache:
    return model(ids, cache=cache, use_cache=True).cache


def recall(model: PreTrainedModel, cache: TitansCache, facts: Tensor) -> float:
    """Returns the share of values predicted after their keys; every question gets a copy of the cache."""
    keys = facts[..., 0].split(1, 1)
    predicted = [model(key, cache=copy.copy(cache)).logits[:, -1].argmax(-1) for key in keys]
    return (torch.stack(predicted, dim=1) == facts[..., 1]).float().mean().item()


@torch.inference_mode()
def compare(model: PreTrainedModel, number: int, filler: int, seed: int) -> dict[str, float]:
    """Returns the recall over the pairs of all texts, by the way the memory was made."""
    texts = make_texts(number, filler, torch.Generator().manual_seed(seed))
    in_turn = None
    for _, ids in texts:
        in_turn = read(model, ids, in_turn)
    alone = [read(model, ids) for _, ids in texts]
    merged = copy.copy(alone[0])
    for n, cache in enumerate(alone[1:], start=2):
        merged.merge(cache, 1 / n)
    caches = {"read in turn": in_turn, "merged": merged, "the first alone": alone[0]}
    return {name: sum(recall(model, cache, facts) for facts, _ in texts) / number for name, cache in caches.items()}


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="folders of Titans models that demo.py has trained")
    parser.add_argument("--numbers", type=int, nargs="+", default=[2, 3, 5], help="numbers of texts, at most 5")
    parser.add_argument("--fillers", type=int, nargs="+", default=[64, 256], help="tokens after the pairs of each text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args(argv)
    if not all(1 < number <= NUM_SYMBOLS // NUM_PAIRS for number in args.numbers):
        raise ValueError(f"--numbers {args.numbers} must be from 2 to {NUM_SYMBOLS // NUM_PAIRS}: keys do not repeat")
    cases = [(path, number, filler) for path in args.models for filler in args.fillers for number in args.numbers]
    rows = []
    for path, number, filler in track(cases, "reading and asking"):
        model = load_model(path, "MODEL").eval()
        rows.append({"model": path, "texts": number, "filler": filler} | compare(model, number, filler, args.seed))
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()))
    Console().print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as stream:
            json.dump(rows, stream, indent=2)
    return rows


if __name__ == "__main__":
    run_command(main)

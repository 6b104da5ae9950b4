"""Trains a model without one of its parts at a time: the paper's ablation (table 5), on novels.

    python -m eval.language.ablation mag --seeds 0 1 2 --train_text DIR --score_text DIR --output runs/ablation.jsonl
    python -m eval.language.compare_runs runs/ablation.jsonl --rows mag* --pairs mag-linear:mag mag-off:mag

The whole model is that of `memory_form="titans"`. Options that are not listed here are those of train_and_score. A row
and seed that the file has is not trained again.
"""

import argparse
from pathlib import Path

from eval.common.records import read_records
from eval.language import train_and_score
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.configuration_titans import WITH_ATTENTION

PARTS = {
    "": None,
    "-linear": "memory_depth=1",
    "-no-convolution": "memory_conv_kernel=1",
    "-no-momentum": "memory_momentum=false",
    "-no-forgetting": "memory_forget=false",
    "-no-persistent": "num_persistent_tokens=0",
    "-off": "memory_max_lr=0",
}


def rows(variant: str) -> dict[str, list[str]]:
    """Returns the settings of each row by its name; only variants with attention have persistent tokens."""
    parts = {part: field for part, field in PARTS.items() if part != "-no-persistent" or variant in WITH_ATTENTION}
    return {variant + part: [] if field is None else [field] for part, field in parts.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("variant", choices=["lmm", *WITH_ATTENTION])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of every row's config")
    parser.add_argument("--output", type=Path, required=True, help="the JSON Lines file to add the runs to")
    args, others = parser.parse_known_args(argv)
    finished = {(record["name"], record["training"]["seed"]) for record in read_records(args.output, "language")}
    for seed in args.seeds:
        for label, settings in rows(args.variant).items():
            if (label, seed) not in finished:
                own = ["--label", label, "--seed", str(seed), "--output", str(args.output)]
                train_and_score.main([args.variant, *own, *others, "--set", "memory_form=titans", *args.set, *settings])


if __name__ == "__main__":
    run_command(main)

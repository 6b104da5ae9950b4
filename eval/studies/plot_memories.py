"""Draws what memories behind a pretrained model gain, by position in the text, from the runs of memory_on_pretrained.

python -m eval.studies.plot_memories eval/results/memory_on_pretrained.jsonl --output docs/pretrained.png
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.figures import plot_with_spread, save_figure

LINES = {
    "full attention, 189 MB": ({"memory": "window", "wider": "arrays-8192"}, {"color": "black", "marker": "s"}),
    "SGD on all weights, 538 MB": (
        {"memory": "window", "wider": "steps-5e-3-of-64"},
        {"color": "tab:green", "marker": "v", "ls": "--"},
    ),
    "window of 1,024, 17.7 MB": (
        {"memory": "window", "wider": "arrays-1024"},
        {"color": "tab:blue", "marker": "D", "ls": ":"},
    ),
    "list of surprising tokens, 0.5 MB": ({"memory": "episodic", "entries": 5400}, {"color": "tab:red", "marker": "o"}),
    "neural cache, 11.8 MB": ({"memory": "cache", "entries": 10240}, {"color": "tab:gray", "marker": "^", "ls": "--"}),
}
SETS = {"test": "six novels", "wikipedia": "ten Wikipedia articles"}
MODEL = "SmolLM2-135M"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the JSON lines of memory_on_pretrained")
    parser.add_argument("--window", type=int, default=256, help="the window of the model")
    parser.add_argument("--output", type=Path, required=True, help="the image file to write")
    args = parser.parse_args(argv)
    runs = [json.loads(line) for line in args.runs.read_text(encoding="utf-8").splitlines()]
    runs = [run for run in runs if run["table"] == "memory-on-smollm2" and run["config"]["window"] == args.window]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(SETS)), SETS.items(), strict=True):
        for label, (config, style) in LINES.items():
            found = [run["result"] for run in runs if run["data"] == name and config.items() <= run["config"].items()]
            if not found:
                continue  # not measured on these texts
            ranges = [key for key in found[0] if "-" in key]
            gains = np.array([[result[key] for key in ranges] for result in found])
            plot_with_spread(axes, range(len(ranges)), gains, style | {"label": label})
        axes.axhline(0, color="gray", linewidth=1)
        ends = [f"{int(key.split('-')[1]):,}" for key in ranges[:-1]]
        axes.set_xticks(range(len(ranges)), [*ends, "end"])
        axes.set(
            title=f"{MODEL}: {title}",
            xlabel="position in the text (tokens; end of each range)",
            ylabel=f"gain over a window of {args.window} alone\n(nats per token)",
        )
    save_figure(figure, args.output)
    print(args.output)


if __name__ == "__main__":
    run_command(main)

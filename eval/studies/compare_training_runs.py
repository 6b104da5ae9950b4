"""Compares runs of titans-hf train: a Markdown table, and their evaluation losses in one plot.

python -m eval.studies.compare_training_runs runs/tiny-* --plot losses.png
"""

import argparse
import json
import math
from pathlib import Path

from matplotlib.figure import Figure

from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.figures import line_styles, save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table


def read_run(folder: Path) -> dict:
    """Reads run.json, and from trainer_state.json the minutes and the evaluation losses (tokens, loss)."""
    if not (folder / "run.json").exists():
        raise FileNotFoundError(f"{folder} holds no run.json: it is not the output of a finished titans-hf train")
    run = json.loads((folder / "run.json").read_text())
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    seconds = [log["train_runtime"] for log in history if "train_runtime" in log]
    # The clock starts again when a run resumes: add up the last reading of each part.
    run["minutes"] = sum(now for now, later in zip(seconds, [*seconds[1:], 0.0], strict=True) if later < now) / 60
    run["curve"] = [(log["num_input_tokens_seen"], log["eval_loss"]) for log in history if "eval_loss" in log]
    return run


def table(runs: dict[str, dict]) -> str:
    columns = ["run", "parameters", "tokens", "minutes", "first eval ppl", "eval ppl", "bits per byte"]
    rows = []
    for name, run in sorted(runs.items(), key=lambda item: item[1]["metrics"]["eval_loss"]):
        first, metrics = math.exp(run["curve"][0][1]), run["metrics"]
        figures = [f"{run['parameters']:,}", f"{run['tokens_seen']:,}", f"{run['minutes']:.1f}", f"{first:.2f}"]
        rows.append([name, *figures, f"{metrics['eval_perplexity']:.2f}", f"{metrics['eval_bits_per_byte']:.3f}"])
    return markdown_table(columns, rows)


def plot(runs: dict[str, dict], path: Path) -> None:
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    styles = line_styles(runs)
    for name, run in runs.items():
        tokens, losses = zip(*run["curve"], strict=True)
        axes.plot([number / 1e6 for number in tokens], losses, **styles[name])
    axes.set(
        xlabel="training tokens (millions)",
        ylabel="evaluation loss (nats per token)",
        title="Evaluation loss while training",
    )
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="output folders of titans-hf train")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    args = parser.parse_args(argv)
    runs = {folder.name: read_run(folder) for folder in args.folders}
    print(table(runs))
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    run_command(main)

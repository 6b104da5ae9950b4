"""Writes the tables of the pages and their charts from the records in eval/results.

    python -m eval.pages          # what stands between <!-- table NAME --> and <!-- end --> in README.md and docs/
    python -m eval.pages --check  # fails, naming the page, where a page and the records differ

A share is in per cent; ± is half of its 95 % interval by Student's t over prompts, texts or seeds. Where all of these
are equal, there is none.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import mean

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from eval.common.records import Record, read_records
from eval.common.tables import frame_of, half_width, read_paper
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.figures import save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "eval" / "results"
MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NONE = "–"  # not measured

METHODS = {
    "window": "window alone",
    "full": "full attention",
    "search": "longest match",
    "bm25": "plain retrieval, sentences",
    "retrieved": "plain retrieval, passage",
    "passages": "`remember`",
}
PAIRED = ("bm25", "retrieved", "passages")  # the questions of a column are those that all of them have answered
COLOURS = {"passages": "tab:red", "retrieved": "tab:blue", "bm25": "tab:cyan", "full": "black", "search": "tab:olive"}
SINGLE = ("niah_single_1", "niah_single_2", "niah_single_3")
OWN_WORDS, TOLD = ("begun", "pair", "updated"), ("begun", "pair", "updated", "cloze")
Scores = dict[tuple, list[float]]  # of the questions of a text or a prompt, whose means are independent


@lru_cache
def load(name: str) -> list[Record]:
    """Returns the records of a file of eval/results."""
    return read_records(RESULTS / f"{name}.jsonl")


def table(caption: str, heading: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    """Formats a table under its caption."""
    return f"{caption}:\n\n{markdown_table(heading, lines)}"


# Behind a pretrained model


def scores(method: str, task: str, data: str, kinds: Sequence[str], length: int = 0, window: int = 256) -> Scores:
    """Returns the scores of a method's answers of some kinds."""
    found = defaultdict(list)
    for record in load("streaming"):
        run = record["run"]
        wanted = run["task"] == task and run["data"] == data and run["window"] == window and run["method"] == method
        if wanted and (not length or run["text"].endswith(f", {length} tokens")):
            for i, answer in enumerate(record["result"]["answers"]):
                if answer[0] in kinds:  # they stand in a text of their own each
                    found[run["text"], run["seed"], i if task in ("ruler", "babilong") else 0].append(float(answer[3]))
    return found


def column(*arguments, **options) -> dict[str, Scores]:
    """Returns the scores of each method, of the questions of a column."""
    found = {name: scores(name, *arguments, **options) for name in METHODS}
    paired = [x.keys() for name, x in found.items() if name in PAIRED and x]
    common = set.intersection(*map(set, paired)) if paired else set()
    return {name: {key: x[key] for key in x.keys() & common} for name, x in found.items()}


def spread(values: Iterable[float], form: str) -> str:
    """Formats a mean with half of its interval; values that are all equal have none."""
    values = list(values)
    half = half_width(values)
    return f"{mean(values):{form}}" + (f" ± {half:{form.lstrip('+')}}" if half else "") if values else NONE


def share(found: Scores) -> str:
    """Formats a share in per cent with its interval."""
    return spread([100 * mean(x) for _, x in sorted(found.items())], ".0f")


def count(found: Scores) -> int:
    return sum(map(len, found.values()))


def of_methods(columns: dict[str, dict[str, Scores]], what: str) -> str:
    """Formats a table with a line for each method, and says how many questions a column has."""
    asked = [max((count(x) for x in of_method.values()), default=0) for of_method in columns.values()]
    lines, fewer = [], []
    for name, label in METHODS.items():
        found = [of_method[name] for of_method in columns.values()]
        if any(found):
            lines.append([label, *map(share, found)])
            less = {count(x) for x, n in zip(found, asked, strict=True) if 0 < count(x) < n}
            fewer += [f"{label} {' or '.join(map(str, sorted(less)))}"] if less else []
    numbers = f"n = {asked[0]}" if len(set(asked)) == 1 else f"n = {', '.join(map(str, asked))} by column"
    caption = f"{what}, per cent ± 95 % interval; {numbers}" + (f" ({'; '.join(fewer)})" if fewer else "")
    return table(caption, ["", *columns], lines)


def differences(columns: dict[str, dict[str, Scores]]) -> str:
    """Formats what `remember` finds more than other methods, of the same questions."""
    lines = []
    for name in ("full", "bm25", "retrieved"):
        cells = []
        for of_method in columns.values():
            ours, its = of_method["passages"], of_method[name]
            more = [100 * (mean(ours[key]) - mean(its[key])) for key in sorted(ours.keys() & its.keys())]
            cells.append(spread(more, "+.0f"))
        lines.append([METHODS[name], *cells])
    return table("Points more than the method of the line ± 95 % interval", ["", *columns], lines)


LENGTHS = (1024, 4096, 16384, 65536)


def needles(kinds: Sequence[str], lengths: Sequence[int] = LENGTHS) -> dict[str, dict[str, Scores]]:
    return {f"{x:,} tokens": column("ruler", "novels", kinds, length=x) for x in lengths}


def all_facts(kinds: Sequence[str]) -> dict[str, Scores]:
    """Returns the scores on novels, Wikipedia and code; of texts that all methods of PAIRED have read, if there are."""
    of_data = [column("facts", data, kinds) for data in FACTS.values()]
    of_data = [x for x in of_data if all(x[name] for name in PAIRED)] or of_data
    return {name: {(i, *key): x for i, y in enumerate(of_data) for key, x in y[name].items()} for name in METHODS}


FACTS = {"novels": "texts", "Wikipedia": "wikipedia", "Python code": "code"}
KINDS = {
    "the sentence begun again": ("begun",),
    "one of two persons": ("pair",),
    "told twice, the newer": ("updated",),
    "in other words": ("cloze",),
}


def far_facts() -> dict[str, dict[str, Scores]]:
    near = {"up to 3,000 tokens": column("facts", "texts", TOLD)}
    return near | {f"{n:,} tokens": column("facts", f"novels-{n}", TOLD) for n in (10000, 30000)}


def compared() -> dict[str, dict[str, Scores]]:
    return {
        "needles": column("ruler", "novels", SINGLE),
        "one of four keys": column("ruler", "novels", ("niah_multikey_1",)),
        "four values": column("ruler", "novels", ("niah_multivalue",)),
        "facts in the text's words": all_facts(OWN_WORDS),
        "facts in other words": all_facts(("cloze",)),
        "facts told in a chat": column("told", "novels", TOLD),
    }


def untold() -> dict[str, dict[str, Scores]]:
    of_texts = {label: column("facts", data, ("absent",)) for label, data in FACTS.items()}
    return of_texts | {"chat": column("told", "novels", ("absent",))}


def costs() -> str:
    """Formats what a needle costs: seconds of a processor for a text and its question, and bytes beyond a window."""
    lines = []
    for name, label in METHODS.items():
        cells = []
        for length in LENGTHS:
            of_length = [
                x for x in load("streaming")
                if x["run"]["method"] == name and x["run"]["task"] == "ruler" and x["run"]["data"] == "novels"
                and x["run"]["window"] == 256 and x["run"]["text"] in {f"{kind}, {length} tokens" for kind in SINGLE}
            ]  # fmt: skip
            seconds = [x["seconds"] / len(x["result"]["answers"]) for x in of_length]
            cells.append(f"{mean(seconds):.1f}" if seconds else NONE)
        lines.append([label, *cells])
    return table("Seconds of a processor for a text and its question", ["", *(f"{x:,} tokens" for x in LENGTHS)], lines)


def chats() -> str:
    """Formats how many answers equal an earlier answer of their chat."""
    lines = []
    for name, label in METHODS.items():
        cells = []
        for is_long in (False, True):
            said = [
                not answer[3]
                for x in load("streaming")
                if x["run"]["task"] == "chat" and x["run"]["method"] == name
                and (int(x["run"]["text"].removeprefix("chat ")) >= 6) == is_long
                and (is_long or x["run"]["data"] == "novels")  # the short ones are the same
                for answer in x["result"]["answers"] if answer[0] == "new"
            ]  # fmt: skip
            cells.append((len(said), f"{100 * mean(said):.0f}" if said else NONE))
        if any(number for number, _ in cells):
            lines.append([label, *(x for _, x in cells)])
    return table(
        "Answers that equal an earlier one, per cent; n = 30, 60 by column",
        ["", "six short chats", "six chats behind a text"],
        lines,
    )


def babilong() -> str:
    """Formats BABILong's tasks beside the most frequent answer."""
    kinds = ("qa1", "qa2", "qa3")
    columns = {kind: {name: scores(name, "babilong", "texts", (kind,)) for name in METHODS} for kind in kinds}
    for of_method in columns.values():  # only texts with a filler
        for found in of_method.values():
            for key in [x for x in found if x[0].endswith(" 0 tokens")]:
                del found[key]
    found = of_methods(columns, "Right place of six, 1,024 to 4,096 tokens")
    most = []
    for kind in kinds:
        values = [
            y[1] for x in load("streaming") if x["run"]["task"] == "babilong" and x["run"]["method"] == "passages"
            and not x["run"]["text"].endswith(" 0 tokens") for y in x["result"]["answers"] if y[0] == kind
        ]  # fmt: skip
        most.append(f"{100 * max(Counter(values).values()) / len(values):.0f}")
    return f"{found}\n| always the most frequent answer | {' | '.join(most)} |"


# Small models


RECALLED = {  # row, learning rate: its label
    ("lmm", 0.002): "Titans (LMM)",
    ("lmm-off", 0.002): "the same, memory off",
    ("gated-deltanet-late", 0.002): "Gated DeltaNet, our start",
    ("gated-deltanet", 0.002): "Gated DeltaNet, Transformers' start",
    ("gated-deltanet", 0.006): "the same at a rate of 0.006",
    ("mamba2", 0.002): "Mamba2",
    ("mamba2", 0.006): "the same at a rate of 0.006",
}


def of_seeds(records: Iterable[Record], labels: dict, key: Callable[[Record], object], value: Callable) -> list[list]:
    """Returns a line for each label with a result of each of three seeds."""
    lines = []
    for name, label in labels.items():
        by_seed = {x["run"]["seed"]: value(x) for x in records if key(x) == name}
        lines.append([label, *(f"{100 * by_seed[i]:.0f}" if i in by_seed else NONE for i in range(3))])
    return lines


def recall() -> str:
    lines = of_seeds(
        load("recalled_facts"), RECALLED, lambda x: (x["run"]["row"], x["run"]["learning_rate"]),
        lambda x: x["result"]["1024"],
    )  # fmt: skip
    return table("Facts right after 1,024 tokens, per cent; n = 128", ["", "seed 0", "seed 1", "seed 2"], lines)


NEEDLE_ROWS = {
    "lmm": "LMM", "mac": "MAC", "mag": "MAG", "mal": "MAL", "gated-deltanet-start": "Gated DeltaNet, our start",
    "gated-deltanet": "Gated DeltaNet", "mamba2": "Mamba2", "mistral": "Mistral",
}  # fmt: skip


def trained_needles(data: str) -> str:
    lengths, lines, seeds = ("1024", "2048", "4096", "16384"), [], set()
    for row, label in NEEDLE_ROWS.items():
        runs = [x for x in load("needles") if x["run"]["data"] == data and x["run"]["row"] == row]
        seeds |= {x["run"]["seed"] for x in runs}
        if runs:
            lines.append([label, *(spread([100 * x["result"][n] for x in runs], ".0f") for n in lengths)])
    heading = ["", *(f"{int(n):,} tokens" for n in lengths)]
    caption = f"Needles found, per cent; n = 32, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
    return table(f"{caption}", heading, lines)


REGRESSION = {
    ("off", None): "memory off",
    ("gated-deltanet", None): "Gated DeltaNet",
    ("delta-1-plain", None): 'one layer, the delta rule (`memory_form="delta"`)',
    ("delta-2-momentum", None): "two layers, momentum (the default form)",
    ("chunk-1-momentum+memory_network=residual", 0.25): "one layer with the paper's norm",
    ("chunk-2-momentum+memory_network=residual", 0.25): "two layers with the paper's norm",
    ("paper", None): "the paper's form",
    ("ridge on the 32 best features", None): "the best linear memory of that width",
    ("kernel ridge", None): "kernel regression, all pairs kept",
}


def regression() -> str:
    lines = []
    for (row, rate), label in REGRESSION.items():
        runs = [
            x for x in load("in_context_regression_1200_steps")
            if x["run"]["task"] == "sines" and x["run"]["row"] == row and x["run"]["width"] == 32
            and x["run"].get("max_lr") == rate
        ]  # fmt: skip
        lines.append([label, len(runs), spread([x["result"]["test"]["144-192"] for x in runs], ".3f")])
    return table("Squared error at pairs 144 to 192, width 32", ["", "seeds", "error"], lines)


def loss_of(record: Record) -> float:
    """Returns the mean loss of a small language model over the positions of its training blocks."""
    edges = [x for x in record["edges"] if x <= record["training"]["block_length"]]
    return float(np.average(record["mean"][: len(edges) - 1], weights=np.diff(edges)))


def losses(name: str) -> dict[str, dict[int, float]]:
    """Returns the loss of each seed of each row of a file of language models."""
    found = defaultdict(dict)
    for record in load(f"language/{name}"):
        found[record["name"]][record["training"]["seed"]] = loss_of(record)
    return found


def less(one: dict[int, float], other: dict[int, float]) -> str:
    """Formats the difference of two rows by seed."""
    both = sorted(one.keys() & other.keys())
    return spread([one[i] - other[i] for i in both], "+.3f")


NOVELS = {
    "lmm": "LMM", "mac": "MAC", "mag": "MAG", "mal": "MAL", "gated-deltanet": "Gated DeltaNet", "mamba2": "Mamba2",
    "mistral-conv": "Mistral, window of 64", "llama-conv": "Llama, full attention",
}  # fmt: skip


def novels() -> str:
    found, lines = losses("blocks-of-2048"), []
    for row, label in NOVELS.items():
        off = found.get(f"{row}-off")
        lines.append([label, spread(found[row].values(), ".3f"), less(found[row], off) if off else NONE,
                      less(found[row], found["mamba2"]) if row != "mamba2" else NONE])  # fmt: skip
    heading = ["", "loss, nats", "less a twin with the memory off", "less Mamba2"]
    return table("Loss ± 95 % interval over three seeds (lower is better)", heading, lines)


PARTS = {
    "mag-off": "the memory", "mag-no-convolution": "its convolution", "mag-no-forgetting": "forgetting",
    "mag-no-momentum": "momentum", "mag-linear": "its second layer", "mag-no-persistent": "persistent tokens",
}  # fmt: skip


def parts() -> str:
    found = losses("ablation")
    lines = [[label, less(found[row], found["mag"])] for row, label in PARTS.items()]
    return table(
        "Loss without a part, less the whole MAG, nats ± 95 % interval over three seeds", ["without", "loss"], lines
    )


DNA = {
    "mag": "MAG", "mag-off": "MAG, memory off", "lmm": "LMM", "llama": "Llama", "mamba2": "Mamba2",
    "cnn": "CNN of GenomicBenchmarks",
}  # fmt: skip


def dna() -> str:
    data = {"promoters": "human_nontata_promoters-test", "enhancers": "human_enhancers_cohn-test"}
    runs, lines = frame_of(load("dna"), "seed", "fold"), []
    for row, label in DNA.items():
        cells = []
        for name in data.values():
            of_row = runs[(runs["row"] == row) & (runs["data"] == name)]
            of_row = of_row[of_row["learning_rate"] == of_row["learning_rate"].mode()[0]]  # others tried another rate
            cells.append(spread(100 * of_row["test"].groupby("fold").mean(), ".1f"))
        lines.append([label, *cells])
    caption = "Accuracy, per cent ± 95 % interval over five folds, three seeds each"
    return table(caption, ["", *data], lines)


FORECASTS = {
    ("lmm-cycle24", 96): "LMM, look-back 96",
    ("lmm-off-cycle24", 96): "the same, memory off",
    ("rlinear-cycle24", 96): "linear model (RLinear), look-back 96",
    ("lmm-context336-cycle24", 336): "LMM, look-back 336",
    ("lmm-context336-off-cycle24", 336): "the same, memory off",
    ("rlinear-cycle24", 336): "linear model (RLinear), look-back 336",
    ("patchtst-cycle24", 336): "PatchTST, look-back 336",
}


def forecasts() -> str:
    runs, lines = frame_of(load("forecasting"), "seed", "horizon"), []
    runs["mse"] = pd.DataFrame(runs["test"].tolist(), runs.index)["mse"]
    paper = read_paper("forecasting")
    for (row, look_back), label in FORECASTS.items():
        cells = []
        for data in paper["columns"]:
            of_row = runs[(runs["row"] == row) & (runs["data"] == data) & (runs["look_back"] == look_back)]
            of_seed = of_row["mse"].unstack("horizon").reindex(columns=paper["horizons"]).dropna().mean(axis=1)
            cells.append(spread(of_seed, ".3f"))
        lines.append([label, *cells])
    lines.append(["the paper's neural memory, look-back 96", *(f"{x[0]:.3f}" for x in paper["rows"]["neural memory"])])
    heading = ["all with a daily cycle, but the paper's", *paper["columns"]]
    return table("Squared error, mean of four horizons ± 95 % interval over three seeds", heading, lines)


TRACKED = {
    ("state_tracking", "parity"): {
        "lmm": "LMM", "lmm-delta-step-1": '`"delta"`, steps up to 1', "mac": "MAC", "mag": "MAG", "mal": "MAL",
        "gated-deltanet": "Gated DeltaNet", "mamba2": "Mamba2", "llama": "Llama",
    },
    ("state_tracking", "s3"): {
        "lmm": "LMM", "lmm-delta-step-1": '`"delta"`, steps up to 1', "gated-deltanet": "Gated DeltaNet",
    },
    ("state_tracking_2400_steps", "s3"): {
        "lmm-step-1": "LMM, steps up to 1, four times the training",
        "lmm-delta-step-1": '`"delta"`, steps up to 1, four times the training',
    },
    ("state_tracking", "s5"): {"lmm": "LMM", "gated-deltanet": "Gated DeltaNet"},
}  # fmt: skip


def tracking() -> str:
    names, lines = {"parity": "parity", "s3": "S₃", "s5": "S₅"}, []
    for (file, task), rows in TRACKED.items():
        records = [x for x in load(file) if x["run"]["task"] == task]
        found = of_seeds(records, rows, lambda x: x["run"]["row"], lambda x: x["result"]["4"])
        lines += [[names[task], *line] for line in found]
    heading = ["group", "", "seed 0", "seed 1", "seed 2"]
    return table("Right states, per cent, in texts four times as long as trained", heading, lines)


def gpu_training() -> str:
    runs = [x for x in load("gpu") if x["benchmark"] == "models"]
    lines = [
        [f"{x['model'].upper() if x['model'] != 'llama' else 'Llama'}, {x['size'].upper()}", f"{x['tokens']:,}",
         f"{x['read tokens/s']:,.0f}", f"{x['train tokens/s']:,.0f}", f"{x['train peak KB/token']:,.0f}"]
        for x in runs
    ]  # fmt: skip
    heading = ["model", "tokens of a text", "read, tokens/s", "train, tokens/s", "peak of training, kB a token"]
    return table("One H200, bfloat16, one run, one text at a time", heading, lines)


def gpu_decoding() -> str:
    runs = [x for x in load("gpu") if x["benchmark"] == "decode"]
    contexts = sorted({x["context"] for x in runs})
    found = defaultdict(dict)
    for x in runs:
        name = "Llama" if x["model"] == "llama" else x["model"].upper()
        found[name + (', `"delta"`' if x["set"] else "")][x["context"]] = f"{x['ms/token']:.0f}"
    lines = [[name, *(of_model.get(n, NONE) for n in contexts)] for name, of_model in found.items()]
    return table("Milliseconds for one more token, 170M", ["model", *(f"{n:,} tokens before" for n in contexts)], lines)


TABLES = {
    "gpu-training": gpu_training,
    "gpu-decoding": gpu_decoding,
    "remember": lambda: of_methods({
        "needles in 1,024 tokens": column("ruler", "novels", SINGLE, length=1024),
        "facts in the text's words": all_facts(OWN_WORDS),
        "facts in other words": all_facts(("cloze",)),
        "facts told in a chat": column("told", "novels", TOLD),
    }, "Right answers"),
    "needles": lambda: of_methods(needles(SINGLE), "Needles found"),
    "one-of-four-keys": lambda: of_methods(needles(("niah_multikey_1",)), "Right numbers"),
    "four-values": lambda: of_methods(needles(("niah_multivalue",)), "Values found"),
    "facts": lambda: of_methods({x: all_facts(kinds) for x, kinds in KINDS.items()}, "Facts right"),
    "facts-by-text": lambda: of_methods({x: column("facts", y, TOLD) for x, y in FACTS.items()}, "Facts right"),
    "far-facts": lambda: of_methods(far_facts(), "Facts right"),
    "told": lambda: of_methods({x: column("told", "novels", kinds) for x, kinds in KINDS.items()}, "Facts right"),
    "untold": lambda: of_methods(untold(), "Questions not answered by a told value"),
    "differences": lambda: differences(compared()),
    "costs": costs,
    "chats": chats,
    "babilong": babilong,
    "recall": recall,
    "needles-in-lines": lambda: trained_needles("pk"),
    "needles-in-prose": lambda: trained_needles("n"),
    "two-words": lambda: trained_needles("w"),
    "regression": regression,
    "novels": novels,
    "parts": parts,
    "dna": dna,
    "forecasts": forecasts,
    "tracking": tracking,
}  # fmt: skip


# Charts: read at 640 pixels, where a letter of 9 points has 12

FONT = {"fontsize": 9}


def label_lines(axes, ends: dict[str, tuple[float, str]], gap: float) -> None:
    """Writes the labels of lines to the right of their ends, none over another: label to height and colour."""
    below = float("inf")
    for label, (y, colour) in sorted(ends.items(), key=lambda x: -x[1][0]):
        below = min(y, below - gap)
        axes.annotate(label, (1.02, below), xycoords=axes.get_yaxis_transform(), color=colour, va="center", **FONT)


def shorter(column: str) -> str:
    """Shortens 4,096 tokens to 4k, for a chart."""
    number = column.removesuffix(" tokens").replace(",", "")
    return (
        f"{int(number) // 1024}k"
        if number.isdigit() and int(number) % 1024 == 0
        else column.removesuffix(" tokens").replace("up to ", "≤ ")
    )


def draw_shares(axes, columns: dict[str, dict[str, Scores]], title: str, unit: str, names: Sequence[str]) -> None:
    """Draws a line with intervals for each method over the columns."""
    ends = {}
    for shift, name in enumerate(names):
        found = [(i, of_method[name]) for i, of_method in enumerate(columns.values()) if of_method.get(name)]
        if not found:
            continue
        values = [[100 * mean(x) for x in y.values()] for _, y in found]
        x = [i + 0.05 * (shift - len(names) / 2) for i, _ in found]
        y = [mean(v) for v in values]
        colour = COLOURS[name]
        axes.errorbar(
            x, y, [half_width(v) for v in values], fmt="o-", color=colour, markersize=4, capsize=2, linewidth=1.2
        )
        ends[METHODS[name].strip("`").replace("plain retrieval, ", "retrieved ")] = (y[-1], colour)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(unit, **FONT)
    axes.set_ylim(-4, 104)
    axes.set_xlim(-0.3, len(columns) - 0.7)
    axes.set_xticks(range(len(columns)), [shorter(x) for x in columns], **FONT)
    axes.tick_params(axis="y", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    label_lines(axes, ends, 9)


def pair_of_panels(path: Path, left: tuple, right: tuple, unit: str) -> None:
    figure = Figure(figsize=(6.67, 3), layout="constrained")
    for axes, panel in zip(figure.subplots(1, 2), (left, right), strict=True):
        draw_shares(axes, *panel)
    figure.supylabel(unit, **FONT)
    save_figure(figure, path)


def draw_needles(path: Path) -> None:
    names = ("full", "bm25", "retrieved", "passages")
    unit, values = "tokens of text (1k = 1,024)", needles(("niah_multivalue",))
    pair_of_panels(
        path, (needles(SINGLE), "One needle", unit, names), (values, "Four values of one key", unit, names), "found, %"
    )


def draw_recall(path: Path) -> None:
    figure = Figure(figsize=(6.67, 3), layout="constrained")
    axes, ends = figure.subplots(), {}
    colours = dict(zip(RECALLED, ("tab:red", "tab:pink", "tab:green", "tab:blue", "", "tab:gray", ""), strict=True))
    for (row, rate), label in RECALLED.items():
        runs = [x for x in load("recalled_facts") if (x["run"]["row"], x["run"]["learning_rate"]) == (row, rate)]
        if len(runs) < 3:
            continue
        lengths = [int(x) for x in runs[0]["result"] if x.isdigit()]
        lines = [[100 * x["result"][str(n)] for n in lengths] for x in runs]
        for line in lines:
            axes.plot(range(len(lengths)), line, color=colours[row, rate], linewidth=0.6, alpha=0.5)
        middle = [mean(x) for x in zip(*lines, strict=True)]
        axes.plot(range(len(lengths)), middle, "o-", color=colours[row, rate], markersize=4, linewidth=2)
        ends[label.replace("the same", "Titans")] = (middle[-1], colours[row, rate])
    axes.axvline(0, color="lightgray", linewidth=6, zorder=0)
    axes.annotate("trained here", (0, 52), rotation=90, ha="center", va="center", **FONT)
    axes.set_xticks(range(len(lengths)), [f"{x:,}" for x in lengths], **FONT)
    axes.tick_params(axis="y", labelsize=9)
    axes.set_ylim(-4, 104)
    axes.set_xlabel("tokens between fact and question", **FONT)
    axes.set_ylabel("facts right, %", **FONT)
    axes.spines[["top", "right"]].set_visible(False)
    label_lines(axes, ends, 8)
    save_figure(figure, path)


def draw_facts(path: Path) -> None:
    names = ("full", "search", "bm25", "retrieved", "passages")
    by_kind = {
        "text's\nwords": all_facts(OWN_WORDS),
        "other\nwords": all_facts(("cloze",)),
        "told in\na chat": column("told", "novels", TOLD),
    }
    left = by_kind, "By question", "how it is asked for", names
    right = far_facts(), "By distance", "tokens between fact and question", names
    pair_of_panels(path, left, right, "facts right, %")


CHARTS = {"needles.png": draw_needles, "facts.png": draw_facts, "recall.png": draw_recall}


def written(text: str) -> str:
    """Returns a page with the tables of its marks. Raises ValueError for a table that is not in TABLES."""

    def fill(match: re.Match) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"<!-- table {name} --> must be one of {', '.join(TABLES)}")
        return f"{begin}{TABLES[name]()}\n{end}"

    return MARKED.sub(fill, text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a page differs")
    args = parser.parse_args(argv)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            if args.check:
                raise ValueError(f"{page.relative_to(ROOT)} differs from the records: run python -m eval.pages")
            page.write_text(new, encoding="utf-8")
    if not args.check:
        for name, draw in CHARTS.items():
            draw(ROOT / "docs" / name)


if __name__ == "__main__":
    run_command(main)

"""Does a deep memory with momentum pay? Regression in context, where a linear memory of few features must fail.

    python -m eval.studies.in_context_regression delta-2-momentum delta-1-plain off --seeds 0 1 2 --output runs.jsonl
    python -m eval.studies.in_context_regression paper paper+memory_momentum=false --output runs.jsonl
    python -m eval.studies.in_context_regression --output runs.jsonl   # prints the tables

A sequence has pairs (x, f(x)), and f is drawn for each sequence. Token t holds x_t and f(x_{t-1}), and the model
predicts f(x_t); the error is its square. One layer is trained, and scored on sequences that were not used before.

    sines   f(x) = sqrt(2 / 32) sum_i sin(w_i x + p_i), x in a cube of R^3, all w_i and p_i drawn for each sequence
    linear  f(x) = w x, x in a cube of R^16: the control, which a linear memory can do
    bursts  sines; half of the runs of 8 pairs show f(x) with noise of standard deviation 1

A row is a cell such as delta-2-momentum: the update rule, the depth, and `momentum` or `plain`. Cells are the form
`titans`, with chunks of 16 for the rule `chunk`; delta-2-momentum is that form itself, delta-1-plain the form `delta`.
Other rows: `paper`, the form; `ttt`, chunk-2-plain that forgets nothing; `off`, never written; gated-deltanet. A row is
changed by fields of its config, such as paper+memory_depth=1. Where memory_conv_kernel is 1, token t holds x_{t-1} too,
of which keys are made.
Regression in closed form sees the same pairs: on x, on as many features as the width, the best ones for `sines` (the
floor of linear memories of this size), and on the covariance of `sines`, which is nearly the best estimator.
"""

import argparse
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

from eval.common.compared_models import Sizes, make_config, num_trained, parse_settings, start_like_titans
from eval.common.harness import StudyRun, add_row_options, optimise, train_rows
from eval.common.records import Record, read_records
from eval.common.tables import with_interval
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.markdown_tables import markdown_table

BENCHMARK = "in_context_regression"
WIDTH, DIMENSIONS = 32, {"sines": 3, "linear": 16, "bursts": 3}
FREQUENCY, SINES = 1.4, 32  # standard deviation of each w_i, and their number
BURST = 8  # pairs that are noisy together
RANGES = [(0, 48), (48, 96), (96, 144), (144, 192), (336, 384)]  # pairs before the prediction
LAST = "144-192"  # the range that tables compare
SCORED, VALIDATED, POINTS = 256, 128, 500  # sequences; points from which the best features are found
FACTORS = {"depth": ("1", "2"), "momentum": ("plain", "momentum"), "rule": ("chunk", "delta")}
SHAPE = {"num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": 0}
SHAPE |= {"hidden_size": WIDTH, "initializer_range": 0.1}
SIZES = Sizes(SHAPE, {"memory_num_heads": 1, "memory_conv_noise": 0})
CELL = re.compile("(?P<rule>chunk|delta)-(?P<depth>[12])-(?P<momentum>momentum|plain)")


@dataclass(frozen=True, kw_only=True)
class Run(StudyRun):
    """All that a run depends on; `max_lr` is the memory's largest step, by default the form's own."""

    task: str
    max_lr: float | None
    pairs: int
    width: int

    @property
    def name(self) -> str:
        step = "" if self.max_lr is None else f", step {self.max_lr:g}"
        width = "" if self.width == WIDTH else f", width {self.width}"
        return f"{self.task}: {self.row}{width}{step}, seed {self.seed}"


def draw(task: str, rows: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draws x (B, T, d), the values that are shown, and the true ones, both (B, T)."""
    x = 3**0.5 * (2 * torch.rand(rows, pairs, DIMENSIONS[task], generator=generator) - 1)  # variance 1
    if task == "linear":
        y = (x @ torch.randn(rows, x.shape[-1], 1, generator=generator) / x.shape[-1] ** 0.5).squeeze(-1)
        return x, y, y
    w = FREQUENCY * torch.randn(rows, x.shape[-1], SINES, generator=generator)
    phases = 2 * math.pi * torch.rand(rows, 1, SINES, generator=generator)
    y = (2 / SINES) ** 0.5 * torch.sin(x @ w + phases).sum(-1)
    if task == "sines":
        return x, y, y
    noisy = (torch.rand(rows, -(-pairs // BURST), generator=generator) < 0.5).repeat_interleave(BURST, 1)[:, :pairs]
    return x, y + noisy * torch.randn(rows, pairs, generator=generator), y


class Learner(nn.Module):
    """One layer of a model between two linear maps: reads pairs, predicts values."""

    def __init__(self, config: PreTrainedConfig, dimensions: int):
        super().__init__()
        width = config.hidden_size
        self.inputs = nn.Linear(dimensions, width)
        self.values = nn.Linear(1, width)
        filtered = getattr(config, "memory_conv_kernel", 4) > 1
        self.inputs_before = None if filtered else nn.Linear(dimensions, width)
        self.body = AutoModel.from_config(config)
        self.output = nn.Linear(width, 1)
        self._start_as_regression(width)

    @torch.no_grad()
    def _start_as_regression(self, width: int) -> None:
        """Lets the memory begin as regression on random features of x: the first quarter of a token is for f(x), of
        which values are made, the rest for x, of which queries and keys are made, with the same weights.

        From plain random weights, most of a short training goes by before a model uses its memory at all.
        """
        eighth = torch.arange(width) * 8 // width
        of_values, of_queries, of_keys = eighth < 2, eighth >= 2, eighth >= 2
        if self.inputs_before is not None:
            of_queries, of_keys = (eighth >= 2) & (eighth < 5), eighth >= 5
        for linear, own in ((self.inputs, of_queries), (self.values, of_values), (self.inputs_before, of_keys)):
            for parameter in () if linear is None else linear.parameters():
                parameter.normal_()[~own] = 0
        q, k, v, output = self._projections()
        q.normal_(std=0.3)[:, ~of_queries] = 0
        k.zero_()[:, of_keys] = q[:, of_queries][:, : of_keys.sum()]
        v.normal_(std=0.3)[:, ~of_values] = 0
        output.mul_(5)

    def _projections(self) -> list[Tensor]:
        """Returns the weights for queries, keys and values, and of the output; Gated DeltaNet starts as Titans do."""
        layer = self.body.layers[0]
        if hasattr(layer, "mixer"):
            return [getattr(layer.mixer.memory, f"{name}_proj").weight for name in "qkvo"]
        start_like_titans(self.body)
        net = layer.linear_attn
        return [*net.in_proj_qkvz.weight.split(net.hidden_size)[:3], net.out_proj.weight]

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        """Predicts f(x_t) (B, T) from x (B, T, d) up to t and the values (B, T) shown before t."""
        last = nn.functional.pad(shown[:, :-1], (1, 0))[..., None]
        tokens = self.inputs(x) + self.values(last)
        if self.inputs_before is not None:
            tokens = tokens + self.inputs_before(nn.functional.pad(x[:, :-1], (0, 0, 1, 0)))
        return self.output(self.body(inputs_embeds=tokens, use_cache=False).last_hidden_state).squeeze(-1)


def config_of(row: str, max_lr: float | None, width: int = WIDTH) -> PreTrainedConfig:
    """Makes the config of a row.

    Raises ValueError for a row that is not known.
    """
    sizes = SIZES._replace(shape=SIZES.shape | {"hidden_size": width})
    base, *fields = row.split("+")
    changes = parse_settings(fields)
    if base == "gated-deltanet":
        return make_config(base, width, changes, sizes)
    settings = {} if max_lr is None else {"memory_max_lr": max_lr}
    others = {"paper": {"memory_form": "paper"}, "off": {"memory_max_lr": 0}, "ttt": {"memory_forget": False}}
    settings |= others.get(base, {})
    if cell := CELL.fullmatch("chunk-2-plain" if base == "ttt" else base):
        settings |= {"memory_update_rule": cell["rule"], "memory_depth": int(cell["depth"])}
        settings |= {"memory_momentum": cell["momentum"] == "momentum"}
        settings |= {"memory_chunk_size": 16} if cell["rule"] == "chunk" else {}
    elif base not in others:
        raise ValueError(f"ROW {row!r} must be paper, ttt, off, gated-deltanet, or such as delta-2-momentum")
    return make_config("lmm", width, settings | changes, sizes)


def by_range(squares: Tensor) -> dict[str, float]:
    """Averages squared errors (B, T) over the sequences and each range of pairs."""
    return {f"{a}-{b}": round(squares[:, a:b].mean().item(), 5) for a, b in RANGES if b <= squares.shape[1]}


@torch.inference_mode()
def score(model: Learner, task: str, rows: int, pairs: int, seed: int) -> Tensor:
    """Computes the squared errors (B, T) on sequences of a seed."""
    x, shown, true = draw(task, rows, pairs, torch.Generator().manual_seed(seed))
    predicted = [model(*part) for part in zip(x.split(64), shown.split(64), strict=True)]
    return (torch.cat(predicted) - true).square()


def train(run: Run, config: PreTrainedConfig) -> Record:
    """Trains a row; returns its errors on sequences to choose a step with, and on those of the tables."""
    model = Learner(config, DIMENSIONS[run.task])

    def draw_loss(generator: torch.Generator) -> Tensor:
        x, shown, true = draw(run.task, run.batch_size, run.pairs, generator)
        return (model(x, shown) - true).square().mean()

    optimise(model, draw_loss, run)
    result = {"valid": by_range(score(model, run.task, VALIDATED, run.pairs, 10**6))}
    result |= {"test": by_range(score(model, run.task, SCORED, 2 * run.pairs, 10**6 + 1))}
    result |= {"parameters": num_trained(model)}
    return {"step": getattr(config, "memory_max_lr", ""), "result": result}


def prediction_errors(kernel: Tensor, shown: Tensor, true: Tensor, ridge: float) -> Tensor:
    """Computes the squared errors (B, T) of kernel ridge regression on the pairs before each: K (B, T, T).

    The Cholesky factor L of K + ridge has them all: y_t - m_t = L_tt (L^-1 y)_t.
    """
    factor = torch.linalg.cholesky(kernel + ridge * torch.eye(kernel.shape[-1], dtype=kernel.dtype))
    innovations = torch.linalg.solve_triangular(factor, shown[..., None], upper=False).squeeze(-1)
    return (factor.diagonal(dim1=-2, dim2=-1) * innovations - shown + true).square()


def closed_forms(task: str, pairs: int, width: int) -> dict[str, dict[str, float]]:
    """Returns the errors of regression in closed form, by its name; the ridge of each is chosen on validation."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:  # the covariance of f: exp(-s^2 |a - b|^2 / 2)
        return torch.exp(-0.5 * FREQUENCY**2 * torch.cdist(a, b).square())

    def features(x: Tensor) -> Tensor:  # the principal functions of the covariance, each as long as it explains
        return kernel(x, points) @ (vectors[:, -width:] / values[-width:].sqrt())

    points = draw(task, 1, POINTS, torch.Generator().manual_seed(1))[0][0].double()
    values, vectors = torch.linalg.eigh(kernel(points, points))
    kernels = {
        "ridge on x": lambda x: x @ x.mT,
        f"ridge on the {width} best features": lambda x: (lambda f: f @ f.mT)(features(x)),
        "kernel ridge": lambda x: kernel(x, x),
    }
    if task == "linear":
        kernels = {name: kernels[name] for name in ("ridge on x",)}
    sets = {}
    for name, rows, length, seed in (("valid", VALIDATED, pairs, 10**6), ("test", SCORED, 2 * pairs, 10**6 + 1)):
        sets[name] = [part.double() for part in draw(task, rows, length, torch.Generator().manual_seed(seed))]
    found = {}
    for name, make in kernels.items():
        gram = {part: make(x) for part, (x, _, _) in sets.items()}
        ridges = {}
        for ridge in (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0):
            ridges[ridge] = prediction_errors(gram["valid"], *sets["valid"][1:], ridge)[:, -48:].mean().item()
        found[name] = by_range(prediction_errors(gram["test"], *sets["test"][1:], min(ridges, key=ridges.get)))
    return found


def choose_steps(records: list[Record], task: str, width: int) -> dict[str, dict[int, Record]]:
    """Returns the runs of each row by seed, with the step that most seeds have; of several, with the step that has the
    least error on validation in the first seed.
    """
    found = defaultdict(lambda: defaultdict(dict))
    for record in records:
        run = record["run"]
        if run["task"] == task and run.get("width", WIDTH) == width:
            found[run["row"]][run["max_lr"]][run["seed"]] = record
    chosen = {}
    for row, by_step in found.items():
        first = min(seed for runs in by_step.values() for seed in runs)
        swept = [runs for runs in by_step.values() if first in runs]
        chosen[row] = min(swept, key=lambda runs: (-len(runs), runs[first]["result"]["valid"][LAST]))
    return chosen


def tables(records: list[Record], task: str, width: int, closed: dict[str, dict[str, float]]) -> str:
    """Formats the errors of all rows, and the paired differences of cells that differ in one factor."""
    rows = choose_steps(records, task, width)
    names = list(next(iter(closed.values())))
    lines = [[name, "", "", *(f"{errors[x]:.4f}" for x in names)] for name, errors in closed.items()]
    for row, runs in rows.items():
        first = next(iter(runs.values()))
        cells = [with_interval([run["result"]["test"][x] for run in runs.values()]) for x in names]
        lines.append([row, first["step"], len(runs), *cells])
    parts = [markdown_table([task, "largest step", "seeds", *names], lines)]
    lines = []

    def differences(changed: str, row: str) -> dict[int, float]:  # by seed
        a, b = ({seed: run["result"]["test"][LAST] for seed, run in rows[x].items()} for x in (changed, row))
        return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}

    for factor, (low, high) in FACTORS.items():
        found = defaultdict(dict)  # the differences of a cell by seed, by what the cells have in common
        for row in rows:
            base, *fields = row.split("+")
            other = "+".join(["-".join(high if part == low else part for part in base.split("-")), *fields])
            if other == row or other not in rows:
                continue
            rule = "both" if factor == "rule" else base.split("-")[0]
            found[rule, *fields][row] = by_seed = differences(other, row)
            lines.append([factor, f"{other} less {row}", with_interval(list(by_seed.values()))])
        for names, cells in found.items():
            seeds = set.intersection(*(set(x) for x in cells.values()))
            if len(cells) > 1 and seeds:
                means = [mean(x[seed] for x in cells.values()) for seed in sorted(seeds)]
                lines.append([factor, f"mean of {len(cells)}, {'+'.join(names)}", with_interval(means)])
    for row in rows:
        base, *fields = row.split("+")
        if fields and base in rows and (by_seed := differences(row, base)):
            lines.append(["+".join(fields), f"{row} less {base}", with_interval(list(by_seed.values()))])
    if lines:
        parts.append(markdown_table(["factor", f"difference at {LAST}", "mean and interval over seeds"], lines))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    help_of_rows = "rows to train; without a row, the tables are printed"
    add_row_options(parser, help_of_rows, "sequences", steps=300, batch_size=8, learning_rate=1e-2)
    parser.add_argument("--task", choices=list(DIMENSIONS), default="sines")
    parser.add_argument("--width", type=int, default=WIDTH, help="width of the layer and its only head")
    parser.add_argument("--max_lr", type=float, help="the memory's largest step, of tables too; by default the form's")
    parser.add_argument("--pairs", type=int, default=192, help="pairs of a sequence")
    args = parser.parse_args(argv)
    check_minimums(args, width=8, pairs=192)
    train_rows(BENCHMARK, Run, args, lambda run: config_of(run.row, run.max_lr, run.width), train)
    if not args.rows:
        closed = closed_forms(args.task, args.pairs, args.width)
        records = read_records(args.output, BENCHMARK)
        records = [record for record in records if args.max_lr in (None, record["run"]["max_lr"])]
        print(tables(records, args.task, args.width, closed))


if __name__ == "__main__":
    run_command(main)

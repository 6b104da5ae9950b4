"""Scores a saved model with caches that need no training: counts of the text, a neural cache, steps while it reads.

    python -m eval.language.train_and_score mag --label mag-off --save_model runs/mag-off-0 --output runs/language.jsonl
    python -m eval.language.caches runs/mag-off-0 --runs runs/language.jsonl --label mag-off --seed 0 --steps \\
        --train_text DIR --choice_text DIR --score_text DIR --output runs/caches.jsonl

It writes a record for each row, so that `compare_runs` sets the rows side by side. NAME is the label of the run:

    NAME             the model
    NAME+counts      a mixture with unigram, bigram and trigram counts of the text so far, as in `counted`
    NAME+neural      a mixture with a neural cache of the whole text so far (Grave et al. 2017): m(w) is the sum of
                     softmax_i(theta h_t . h_i) over those i < t that w followed; h_t: what the LM head reads
    NAME+both        a mixture with both
    NAME+steps       with --steps, dynamic evaluation: a step of SGD on the last tokens after they have been scored

All is chosen on the choice texts alone: the shares by expectation maximisation; theta, the rate of SGD and the tokens
of a step out of the values below, the last two on the beginning of each text's first stretch.
"""

import argparse
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, PreTrainedModel

from eval.common.compared_models import build_model
from eval.common.records import read_records
from eval.language.counted import CACHE_ORDER, Shares, add_text_options, cache_probabilities, read_stretches, write_row
from eval.language.token_blocks import make_tokenizer
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.text_files import find_files

THETAS = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
RATES = (0.02, 0.04, 0.08)
STEP_TOKENS = (32, 128)
STEP_CHOICE = 8192  # tokens of a stretch that a rate is chosen on
QUERIES = 512  # compared with the whole text at once


@torch.inference_mode()
def read_text(model: PreTrainedModel, ids: Tensor) -> tuple[np.ndarray, Tensor]:
    """Reads ids (T + 1,): the probability of each token but the first (T,), and what the LM head has read (T, D)."""
    hidden = model.base_model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0]
    logits = model.get_output_embeddings()(hidden).float()
    return cross_entropy(logits, ids[1:], reduction="none").double().neg().exp().numpy(), hidden


@torch.inference_mode()
def neural_cache(hidden: Tensor, ids: Tensor) -> np.ndarray:
    """Computes m of each next token, with each theta: h (T, D), ids (T + 1,) -> (T, thetas); nan for the first."""
    places, m = torch.arange(len(hidden)), torch.full((len(hidden), len(THETAS)), torch.nan)
    for at in places[1:].split(QUERIES):
        seen = places[: at[-1]]
        scores = (hidden[at] @ hidden[seen].T).masked_fill_(seen >= at[:, None], -torch.inf)  # (Q, D) @ (D, N)
        is_next = ids[1:][seen] == ids[1:][at][:, None]
        for i, theta in enumerate(THETAS):
            m[at, i] = (theta * scores).softmax(1).mul_(is_next).sum(1)
    return m.double().numpy()


def read_stretches_with(model: PreTrainedModel, stretches: np.ndarray) -> np.ndarray:
    """Computes what the model, the neural cache with each theta, and the counts give: (N, T, 1 + thetas + counts)."""
    parts = []
    for text in stretches:
        ids = torch.from_numpy(text)
        p, hidden = read_text(model, ids)
        parts.append(np.concatenate([p[:, None], neural_cache(hidden, ids), cache_probabilities(text)], axis=1))
    return np.stack(parts)


def steps_while_reading(model: PreTrainedModel, ids: Tensor, rate: float, step_tokens: int) -> np.ndarray:
    """Computes the probability of each token but the first of ids (T + 1,) from the weights that the tokens before it
    have left: (T,).

    What the model can see, its windows one upon the other, is read anew for every step. The weights are put back.
    """
    trained = {name: x.clone() for name, x in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    reach, losses = model.config.num_hidden_layers * model.config.sliding_window, []
    for start in range(0, len(ids) - 1, step_tokens):
        end = min(start + step_tokens, len(ids) - 1)
        inputs = ids[max(0, start - reach) : end]
        logits = model(input_ids=inputs[None], use_cache=False, logits_to_keep=end - start).logits[0].float()
        loss = cross_entropy(logits, ids[start + 1 : end + 1], reduction="none")
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        losses.append(loss.detach().double())
    model.load_state_dict(trained)
    return torch.cat(losses).neg().exp().numpy()


def mean_loss(p: np.ndarray) -> float:
    """Returns the mean loss of probabilities, nats per token."""
    return round(float(-np.log(p).mean()), 4)


def choose_mixtures(parts: np.ndarray) -> tuple[dict[str, tuple[list[int], Shares]], dict[str, float]]:
    """Chooses theta and the shares: the columns of parts and their shares by name, and the losses of all choices."""
    first_count = 1 + len(THETAS)
    counts = list(range(first_count, first_count + CACHE_ORDER))
    by_theta = {theta: [0, 1 + i] for i, theta in enumerate(THETAS)}
    losses = {theta: mean_loss(Shares(parts[..., x]).mix(parts[..., x])) for theta, x in by_theta.items()}
    neural = by_theta[min(losses, key=losses.get)]
    columns = {"counts": [0, *counts], "neural": neural, "both": [*neural, *counts]}
    mixtures = {name: (x, Shares(parts[..., x])) for name, x in columns.items()}
    return mixtures, {"alone": mean_loss(parts[..., 0])} | {f"theta {x}": loss for x, loss in losses.items()}


def choose_steps(model: PreTrainedModel, stretches: np.ndarray) -> tuple[float, int, dict[str, float]]:
    """Chooses the rate of SGD and the tokens of a step: both, and the losses of all choices."""
    losses = {
        x: mean_loss(np.stack([steps_while_reading(model, torch.from_numpy(text), *x) for text in stretches]))
        for x in product(RATES, STEP_TOKENS)
    }
    return *min(losses, key=losses.get), {f"rate {rate}, {n} tokens": loss for (rate, n), loss in losses.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the folder that train_and_score --save_model has made")
    parser.add_argument("--runs", type=Path, required=True, help="the JSON Lines file of the model's run")
    parser.add_argument("--label", required=True, help="the run's label; --seed is its seed")
    parser.add_argument("--steps", action="store_true", help="dynamic evaluation too; the model has windows")
    add_text_options(parser)
    args = parser.parse_args(argv)
    runs = {(x["name"], x["training"]["seed"]): x for x in read_records(args.runs, "language")}
    if (args.label, args.seed) not in runs:
        raise ValueError(f"--label and --seed must be one of {sorted(runs)}, but are {(args.label, args.seed)}")
    run = runs[args.label, args.seed]
    model = build_model(run["model"], AutoConfig.from_pretrained(args.model)).eval()
    load_model(model, args.model / "model.safetensors")
    start = time.time()
    tokenizer = make_tokenizer(find_files(args.train_text, "--train_text"), model.config.vocab_size, args.cache)
    choice = read_stretches([args.choice_text], tokenizer, args)[1]
    mixtures, losses = choose_mixtures(read_stretches_with(model, choice))
    names, stretches = read_stretches(args.score_text, tokenizer, args)
    parts = read_stretches_with(model, stretches)
    rows = {"": parts[..., 0]} | {f"+{name}": shares.mix(parts[..., x]) for name, (x, shares) in mixtures.items()}
    if args.steps:
        *step, by_step = choose_steps(model, choice[:: args.stretches, : STEP_CHOICE + 1])
        losses |= by_step
        rows["+steps"] = np.stack([steps_while_reading(model, torch.from_numpy(ids), *step) for ids in stretches])
    about = {name: run[name] for name in ("model", "settings", "parameters", "config", "training")}
    for name, p in rows.items():
        write_row({"name": args.label + name, **about, "choice_losses": losses}, p, names, start, args.output)


if __name__ == "__main__":
    run_command(main)

"""Measures what retrieval of distant tokens could gain a trained language model, without training anything.

    python -m eval.language.distant_retrieval runs/mag-off --train_text data/books/train \
        --choice_text data/books/valid --score_text data/books/test --output runs/retrieval.jsonl

The model's last hidden state h_t is the query at token t; it can retrieve the pairs of h_i and the token that
followed, x_{i+1}, at least `--distance` tokens before. "pointer": a softmax over the cosines of h_t and all h_i, mixed
with the model's probabilities. Otherwise the pairs are written into one matrix by the delta rule, with features of h_i
as keys and embeddings of x_{i+1} as values, and the retrieved values are added to the logits: "linear", h itself, or
"relu-N", N random features max(0, w h - 1.5), of length 1. Sharpness, share and scale are chosen on other texts.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, relu

import titans_hf  # noqa: F401  registers the model type "titans"
from eval.common.records import append_record
from eval.language.token_blocks import cut_stretches, make_tokenizer, read_documents
from titans_hf.cli.shared.checkpoints import load_model
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.text_files import find_files

SHARPNESS, SHARES = (5, 10, 20, 40), (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
SCALES, STEP, THRESHOLD = (1, 2, 3, 4, 6, 8), 0.5, 1.5


class Predictions(NamedTuple):
    """The model's last hidden_states (N, T, hidden) and logits (N, T, vocab), and the tokens that follow, (N, T)."""

    hidden_states: Tensor
    logits: Tensor
    following: Tensor


def pointer_losses(predictions: Predictions, start: int, distance: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the mean losses (N,) from token `start` on of mixtures with a pointer cache, with their settings."""
    keys, (_, logits, following) = normalize(predictions.hidden_states, dim=-1), predictions
    positions = torch.arange(keys.shape[1])
    distant = positions[start:, None] - distance > positions
    probability = logits[:, start:].softmax(-1).gather(-1, following[:, start:, None])[..., 0]
    for sharpness in SHARPNESS:
        pointed = []
        for states, tokens in zip(keys, following, strict=True):  # (T, hidden), (T,)
            weights = (sharpness * states[start:] @ states.T).masked_fill(~distant, -torch.inf).softmax(-1)
            pointed.append((weights * (tokens == tokens[start:, None])).sum(-1))
        for share in SHARES:
            mixed = (1 - share) * probability + share * torch.stack(pointed)
            yield f"sharpness {sharpness}, share {share}", -mixed.log().mean(1)


def make_features(name: str, hidden_states: Tensor, centre: Tensor) -> Tensor:
    """Computes the keys (N, T, features) of a delta-rule memory, of length 1."""
    centred = normalize(hidden_states - centre, dim=-1)
    if name == "linear":
        return centred
    generator, size = torch.Generator().manual_seed(0), hidden_states.shape[-1]
    directions = normalize(torch.randn(size, int(name.removeprefix("relu-")), generator=generator), dim=0) * size**0.5
    return normalize(relu(centred @ directions - THRESHOLD), dim=-1)


def retrieve(keys: Tensor, values: Tensor, start: int, distance: int) -> Tensor:
    """Writes keys (N, T, features) and values (N, T, d) by the delta rule, `distance` tokens late; returns what each
    token from `start` on retrieves: (N, T - start, d).
    """
    memory, retrieved = keys.new_zeros(len(keys), keys.shape[-1], values.shape[-1]), []
    for t in range(keys.shape[1]):
        written = t - distance - 1
        if written >= 0:
            key = keys[:, written, None]  # (N, 1, features)
            memory.baddbmm_(key.mT, STEP * (values[:, written, None] - key @ memory))
        if t >= start:
            retrieved.append(keys[:, t, None] @ memory)
    return torch.cat(retrieved, dim=1)


def memory_losses(
    name: str, predictions: Predictions, embeddings: Tensor, centre: Tensor, start: int, distance: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields the mean losses (N,) from token `start` on with what a memory retrieves in the logits, by its scale."""
    embeddings = normalize(embeddings, dim=-1)
    keys = make_features(name, predictions.hidden_states, centre)
    retrieved = retrieve(keys, embeddings[predictions.following], start, distance) @ embeddings.T
    for scale in SCALES:
        logits = predictions.logits[:, start:] + scale * retrieved
        yield f"scale {scale}", cross_entropy(logits.mT, predictions.following[:, start:], reduction="none").mean(1)


@torch.inference_mode()
def predict(model, stretches: Tensor) -> Predictions:
    """Runs the model on stretches (N, T + 1), one after the other."""
    model.eval()
    parts = [model.model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state.float() for ids in stretches]
    hidden_states = torch.cat(parts)
    return Predictions(hidden_states, hidden_states @ model.lm_head.weight.float().T, stretches[:, 1:])


@torch.inference_mode()
def compare(model, chosen_on: Tensor, scored_on: Tensor, methods: list[str], distance: int) -> dict[str, dict]:
    """Returns, for every method, the settings that are best on the stretches `chosen_on`, and the mean loss less the
    model's own, in nats per token, on both. The second half of each stretch is scored.
    """
    start, embeddings = (chosen_on.shape[1] - 1) // 2, model.lm_head.weight.float()
    both = [predict(model, stretches) for stretches in (chosen_on, scored_on)]
    plain = [cross_entropy(x.logits[:, start:].mT, x.following[:, start:], reduction="none").mean() for x in both]
    centre, table = both[0].hidden_states.mean((0, 1)), {}
    for method in methods:
        losses = [
            dict(
                pointer_losses(x, start, distance)
                if method == "pointer"
                else memory_losses(method, x, embeddings, centre, start, distance)
            )
            for x in both
        ]
        best = min(losses[0], key=lambda settings: losses[0][settings].mean().item())
        gains = [round((x[best].mean() - loss).item(), 4) for x, loss in zip(losses, plain, strict=True)]
        table[method] = {"settings": best, "choice": gains[0], "score": gains[1]}
        print(method, table[method], flush=True)
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", type=Path, help="a folder that train_and_score.py has saved with --save_model")
    parser.add_argument("--train_text", type=Path, required=True, help="the texts that its tokenizer was made of")
    parser.add_argument("--choice_text", type=Path, required=True, help="a folder of .txt files to choose settings on")
    parser.add_argument("--score_text", type=Path, required=True, help="a folder of other .txt files")
    parser.add_argument("--methods", nargs="+", default=["pointer", "linear", "relu-512", "relu-2048"])
    parser.add_argument("--distance", type=int, default=64, help="tokens that the model has seen already")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a stretch")
    parser.add_argument("--stretches", type=int, default=2, help="stretches of each text")
    parser.add_argument("--cache", type=Path, default=Path("runs/language"), help="for the tokenizer and token ids")
    parser.add_argument("--output", type=Path, required=True, help="the JSON Lines file to add the result to")
    args = parser.parse_args(argv)
    for method in args.methods:
        if not re.fullmatch(r"pointer|linear|relu-[1-9]\d*", method):
            raise ValueError(f"--methods must be of pointer, linear, relu-N, but has {method}")
    if not 0 <= args.distance < args.length // 2:
        raise ValueError(
            f"--distance must be from 0 to less than half of --length {args.length}, but is {args.distance}"
        )
    model = load_model(args.model, "MODEL")
    tokenizer = make_tokenizer(find_files(args.train_text, "--train_text"), model.config.vocab_size, args.cache)
    stretches = []
    for option in ("choice_text", "score_text"):
        documents = read_documents(find_files(getattr(args, option), f"--{option}"), tokenizer, args.cache)
        stretches.append(torch.from_numpy(cut_stretches(documents, args.length, args.stretches)))
    table = compare(model, *stretches, args.methods, args.distance)
    record = {
        "benchmark": "distant_retrieval",
        "model": args.model.name,
        "distance": args.distance,
        "length": args.length,
        "methods": table,
    }
    append_record(record, args.output)


if __name__ == "__main__":
    run_command(main)

"""Fits the episodic token memory of a Titans to texts, in minutes on a CPU: no weight of the model itself is trained.

titans-hf fit-memory smollm2-titans --text books/ --output smollm2-titans-fitted

The keys are fitted to the hidden states of the texts. The gate decides how much the memory is trusted; it
is fitted to the loss of the texts and, unless --recalls is 0, of recalls. These are texts made by this command: facts
are told, a part of the given texts follows, and the facts are asked for in a conversation or told again. A model
without the memory gets one. Texts of the kind that the model is to read serve best.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from titans_hf.cli import fit
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.checkpoints import load_config, load_model, load_tokenizer
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.devices import choose_device
from titans_hf.cli.shared.text_files import find_files
from titans_hf.convert_titans import EPISODIC
from titans_hf.episodic_fit import FitResult, fit_episodic_memory
from titans_hf.remember.recalls import make_recalls


def cut_texts(files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> list[Tensor]:
    """Returns parts of at most `length` ids (T,) each, as many ids in all as `number` full parts have."""
    return fit.cut_texts(files, tokenizer, length, number * length)


def make_documents(
    parts: list[Tensor], tokenizer: PreTrainedTokenizerBase, number: int, share: float, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns `parts` followed by `number` texts with recalls, every other one a conversation, and a weight for each of
    their tokens. The weight is 1, but for the answers: all answers together have `share` times the weight of the parts.
    """
    recalls = make_recalls(parts, tokenizer, number, seed)
    documents, weights = list(parts), [torch.ones(len(part)) for part in parts]
    num_answers = sum(int(is_answer.sum()) for _, is_answer in recalls)
    for ids, is_answer in recalls:
        documents.append(ids)
        weights.append(torch.where(is_answer, share * sum(map(len, parts)) / num_answers, 1.0))
    return documents, weights


def config_with_memory(path: str, entries: int | None, threshold: float | None) -> PreTrainedConfig:
    """Returns the configuration of a checkpoint, with an episodic memory of the given size and threshold, or, for None,
    of its own. Raises ValueError if it is not a Titans, or has a token memory of the other form.
    """
    config = load_config(path, "MODEL")
    if config.model_type != "titans":
        raise ValueError(f"MODEL {path} is a {config.model_type} model: `titans-hf convert` makes a Titans of it")
    if config.token_memory_features:
        raise ValueError(f"MODEL {path} has a token memory of the form 'delta', which is trained with the model")
    if not config.token_memory_entries:
        config.token_memory_key_size = min(config.token_memory_key_size, config.hidden_size)
    config.token_memory_form = "episodic"
    config.token_memory_entries = entries or config.token_memory_entries or EPISODIC["token_memory_entries"]
    if threshold is not None:
        config.token_memory_threshold = threshold
    config.validate()
    return config


def report(result: FitResult, num_texts: int) -> str:
    """Describes what the memory gains on the texts of a fit, which are its first `num_texts` documents."""
    columns, before, after = (torch.cat(x[:num_texts]) for x in result)
    gains = before - after
    thousands = [gains[columns // 1000 == i].mean() for i in range(int(columns.max()) // 1000 + 1)]
    return (
        f"{len(gains):,} tokens of text: loss {before.mean():.3f} without the memory, {after.mean():.3f} with it "
        f"({gains.mean():+.3f} nats)\ngain of each thousand tokens of a text: "
        f"{', '.join(f'{x:+.3f}' for x in thousands)}\n"
        "measured on the texts of the fit themselves"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a Titans checkpoint: a folder or a name on the Hub")
    parser.add_argument("--text", nargs="+", required=True, help="files, or folders of files, to fit the memory to")
    parser.add_argument("--output", type=Path, required=True, help="a new folder for the fitted model")
    parser.add_argument("--tokens", type=int, default=90_000, help="tokens of text to read, spread over the files")
    parser.add_argument("--length", type=int, default=6144, help="tokens of a part that is read at a stretch")
    parser.add_argument("--entries", type=int, help="entries of the memory; default: the model's, or 5400")
    parser.add_argument("--threshold", type=float, help="least loss of a surprise, in nats; default: the model's")
    parser.add_argument("--recalls", type=int, default=32, help="texts to recall facts from, half of them chats")
    parser.add_argument("--recall_share", type=float, default=0.05, help="weight of all answers; the texts have 1")
    parser.add_argument("--seed", type=int, default=0, help="seed of the recalls")
    parser.add_argument("--device", help="cpu, cuda, ...; a GPU if there is one")
    args = parser.parse_args(argv)
    check_minimums(args, tokens=2, length=2, entries=1, threshold=0, recalls=0, recall_share=0)
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists: give the name of a new folder")
    check_folder(args.output, "--output")
    return args


def write_fitted(args: argparse.Namespace) -> None:
    """Writes the fitted model of parsed arguments, and prints what its memory gains."""
    files = [file for path in args.text for file in find_files(path, "--text")]
    config, tokenizer = (
        config_with_memory(args.model, args.entries, args.threshold),
        load_tokenizer(args.model, "MODEL"),
    )
    parts = cut_texts(files, tokenizer, args.length, -(-args.tokens // args.length))
    if not parts:
        raise ValueError(f"--text {' '.join(args.text)} holds no text")
    device, verbosity = choose_device(args.device), logging.get_verbosity()
    logging.set_verbosity_error()  # no report that a new memory's parameters are missing
    model = load_model(args.model, "MODEL", config=config, dtype="auto").to(device)
    logging.set_verbosity(verbosity)
    documents, weights = make_documents(parts, tokenizer, args.recalls, args.recall_share, args.seed)
    print(report(fit_episodic_memory(model, documents, weights), len(parts)))
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    if (card := Path(args.model) / "README.md").is_file():
        shutil.copy(card, args.output)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    write_fitted(args)
    print(args.output)


if __name__ == "__main__":
    run_command(main)

"""Fits the episodic token memory of a Titans to texts, in minutes on a CPU: no weight of the model itself is trained.

titans-hf fit-memory smollm2-titans --text books/ --output smollm2-titans-fitted

The keys are fitted to the hidden states of the texts. The gate decides how much the memory is trusted; it
is fitted to the loss of the texts and, unless --recalls is 0, of recalls. These are texts made by this command: facts
are told, a part of the given texts follows, and the facts are asked for in a conversation or told again. A model
without the memory gets one. Texts of the kind that the model is to read serve best.
"""

import argparse
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.checkpoints import load_config, load_model, load_tokenizer
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.devices import choose_device
from titans_hf.cli.shared.text_files import find_files, read_text
from titans_hf.cli.shared.text_ids import encode
from titans_hf.convert_titans import EPISODIC
from titans_hf.episodic_fit import FitResult, fit_episodic_memory

CHARACTERS = 12  # of text that are cut for each token: more than a token has
FILLERS = (200, 500, 700, 1000, 1500)  # tokens of text between telling and asking
NAMES = "Marguerite Tobias Ingrid Rolando Philippa Desmond Yolanda Barnaby Winifred Anselm Beatrix Cornelius Dorothea"
PLACES = "Lisbon Valparaiso Bergen Windhoek Cartagena Antwerp Nagasaki Tbilisi Casablanca Heidelberg Reykjavik Trieste"
THINGS = "telescope accordion hammock lantern typewriter umbrella saxophone microscope kettle tapestry compass violin"
KINDS = {"name": NAMES.split(), "place": PLACES.split(), "thing": THINGS.split()}
# The kind of a fact, how it is told, how it is asked for, and how the answer begins.
FACTS = [
    (
        "name",
        "My neighbour across the street is {}.",
        "Who lives across the street?",
        "The person across the street is",
    ),
    ("name", "The captain of our team is named {}.", "What is our team's captain called?", "Your captain's name is"),
    ("name", "I was taught to swim by {}.", "Who taught me to swim?", "You learned to swim from"),
    ("name", "We named the parrot {}.", "What is our parrot called?", "The parrot is called"),
    ("place", "I grew up in {}.", "In which city did I grow up?", "You grew up in"),
    ("place", "The conference will be held in {}.", "Where is the conference?", "The conference is in"),
    ("place", "My parents moved to {} last year.", "Where do my parents live now?", "Your parents live in"),
    ("thing", "I bought a {} at the market.", "What did I buy at the market?", "At the market you bought a"),
    ("thing", "In the attic there is an old {}.", "What old thing is in the attic?", "In the attic there is a"),
    ("number", "The train leaves from platform {}.", "Which platform is my train's?", "It leaves from platform"),
    ("number", "The password of the alarm is {}.", "What is the alarm's password?", "The alarm's password is"),
    ("number", "My member number is {}.", "What is my membership number?", "Your membership number is"),
]


def cut_texts(files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> list[Tensor]:
    """Returns about `number` parts of at most `length` ids (T,) each, spread evenly over the files and within them."""
    parts = []
    for i, file in enumerate(files):
        text, share = read_text(file, "--text"), number // len(files) + (i < number % len(files))
        for j in range(share):
            start = len(text) * j // share
            end = min(len(text) * (j + 1) // share, start + CHARACTERS * length)
            parts.append(torch.tensor(encode(tokenizer, text[start:end]).input_ids[:length]))
    return [ids for ids in parts if len(ids) > 1]


def make_recall(
    tokenizer: PreTrainedTokenizerBase, filler: str, choose: random.Random, is_chat: bool
) -> tuple[Tensor, Tensor]:
    """Makes a text in which four facts are told, `filler` is read, and the facts are asked for in a conversation, or
    told again in prose. Returns its ids (T,), and (T,) bool, True at the tokens of the answers.
    """
    told, asked, answers = [], [], []
    for kind, statement, question, start in choose.sample(FACTS, 4):
        digits = "".join(str(choose.randrange(10)) for _ in range(choose.randint(2, 6)))
        value = choose.choice(KINDS[kind]) if kind in KINDS else digits
        told.append(statement.format(value))
        asked.append((question, f"{start} {value}.") if is_chat else (told[-1],))
        answers.append((f"{start} " if is_chat else statement.split("{}")[0], value))
    choose.shuffle(asked)
    turns = [" ".join(told), filler, " ".join(x[0] for x in asked)]
    if is_chat:
        turns = [f"Some things about me. {turns[0]}", "Thank you, I will remember that."]
        turns += [f"Please read this.\n\n{filler}", "I have read it.", *(turn for pair in asked for turn in pair)]
    if tokenizer.chat_template is None or not is_chat:
        text = "\n\n".join(turns)
    else:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    is_answer = torch.zeros(len(encoded.input_ids), dtype=torch.bool)
    for start, value in answers:
        begin = text.rindex(start + value) + len(start)
        overlaps = [a < begin + len(value) and b > begin for a, b in encoded.offset_mapping]
        is_answer |= torch.tensor(overlaps)
    return torch.tensor(encoded.input_ids), is_answer


def make_documents(
    parts: list[Tensor], tokenizer: PreTrainedTokenizerBase, number: int, share: float, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns `parts` followed by `number` texts with recalls, every other one a conversation, and a weight for each of
    their tokens. The weight is 1, but for the answers: all answers together have `share` times the weight of the parts.
    """
    choose, recalls = random.Random(seed), []
    for i in range(number):
        part = parts[choose.randrange(len(parts))]
        length = FILLERS[i // 2 % len(FILLERS)]
        start = choose.randrange(max(1, len(part) - length))
        recalls.append(make_recall(tokenizer, tokenizer.decode(part[start : start + length]), choose, i % 2 == 0))
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


def fit(args: argparse.Namespace) -> None:
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
    fit(args)
    print(args.output)


if __name__ == "__main__":
    run_command(main)

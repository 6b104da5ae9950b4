"""What is read and asked, and the answers: losses, facts, RULER, BABILong, conversations."""

import argparse
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple

import torch
from scipy.stats import binomtest
from torch import Tensor, tensor
from transformers import PreTrainedTokenizerBase

from eval.common.records import Record
from eval.streaming import conversation, ruler, stories
from eval.streaming.facts import Answer, judge, make_text
from eval.streaming.readers import Reader
from eval.streaming.reading import Link, Question, Stream, load_texts, read_text

PER_BLOCK = 256  # tokens of a mean loss in a record
LENGTHS = {"facts": [700, 1200, 2000, 3000], "ruler": [1024, 2048, 4096], "babilong": [0, 1024, 2048, 4096]}


class Task(NamedTuple):
    """A text of a record: ids with facts in them, which are read once; or contexts with questions after each."""

    text: str
    ids: Tensor | None = None
    answers: list[Answer] = []
    parts: list[tuple[str, list[Question]]] = []


def make_tasks(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """Makes all texts of a task."""
    if args.task == "babilong":
        make = partial(stories.make_stories, args.stories, args.text[0], tokenizer, args.number)
        kinds = product(args.lengths, stories.BEGUN)
        return [Task(f"{kind}, {length} tokens", parts=make(kind, length)) for length, kind in kinds]
    longest = max(args.lengths, default=0)
    needed = {"loss": args.tokens, "facts": longest, "ruler": 2 * longest, "conversation": conversation.TOKENS}
    texts = {}
    for path in args.text:
        texts |= load_texts(path, tokenizer, needed[args.task], args.place)
    if not texts:
        raise ValueError(f"--text {args.text[0]} has no text of so many tokens")
    if args.task == "loss":
        return [Task(name, ids) for name, ids in texts.items()]
    names, tasks = sorted(texts), []
    if args.task == "facts":
        for i, length in enumerate(args.lengths):
            name = names[i * len(names) // len(args.lengths)]
            filler, seed = tokenizer.decode(texts[name][:length]), f"{args.data} {length} {args.seed}"
            tasks.append(Task(f"{name}, {length} tokens", *make_text(filler, tokenizer, seed)))
        return tasks
    fillers = [tokenizer.decode(texts[name]) for name in names]
    if args.task == "conversation":
        make, users = conversation.make_conversation, zip(range(args.number), cycle(fillers), strict=False)
        return [Task(f"user {i}", parts=[make(filler, tokenizer, f"{i} {args.seed}")]) for i, filler in users]
    make = partial(ruler.make_prompts, tokenizer, args.number, fillers, args.seed)
    kinds = product(args.lengths, ruler.GENERATED)
    return [Task(f"{kind}, {length} tokens", parts=make(kind, length)) for length, kind in kinds]


def is_hopeless(task: Task, records: list[Record], about: dict[str, Any]) -> bool:
    """Tells whether full attention is at chance in a kind of BABILong without a filler: then no longer texts are read.

    Chance is the most frequent answer, by a binomial test of 5 %. Raises ValueError for a text with a filler, if full
    attention has not read those without.
    """
    kind, _, length = task.text.partition(", ")
    if about["task"] != "babilong" or length == "0 tokens":
        return False
    wanted = about | {"text": f"{kind}, 0 tokens", "method": "full"}
    answers = next((x["result"]["answers"] for x in records if x["run"] == wanted), None)
    if answers is None:
        raise ValueError(f"--task babilong needs --methods full --lengths 0 first, of {kind}")
    right, values = sum(x[3] for x in answers), [x[1] for x in answers]
    floor = max(map(values.count, values)) / len(values)
    return binomtest(int(right), len(answers), floor, alternative="greater").pvalue > 0.05


def tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Returns the ids (T,) of a text."""
    return tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def ask(stream: Stream, parts: list[tuple[str, list[Question]]], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Reads contexts and asks for what follows, each question in a branch of its own.

    Returns for each chain the answers, the most bytes of a state, and the tokens of all contexts. An answer is its
    kind, the right value, what was said, whether it is right or which share of it, and with options the log probability
    of each. Raises ValueError for a reader that changes the model.
    """
    if stream.reader.learns:
        raise ValueError("--methods sgd and rms change the model, which has no branches: --task may be loss or facts")
    answers, most, tokens = {name: [] for name in stream.chains}, dict.fromkeys(stream.chains, 0), 0
    for context, questions in parts:
        ids = tokenize(context, tokenizer)
        tokens += len(ids)
        stream.begin()
        for _ in stream.read(ids):
            pass
        most = {name: max(x, stream.state_bytes(name)) for name, x in most.items()}
        told = stream.save()
        for question in questions:
            stream.restore(told)
            first = {name: rows[-1] for name, rows in stream.after(tokenize(question.text, tokenizer)).items()}
            asked = stream.save()
            of_options = {name: {} for name in first}
            for option in question.options:
                stream.restore(asked)
                ids = tokenize(f" {option}", tokenizer)
                rest = stream.after(ids[:-1]) if len(ids) > 1 else {}
                for name, row in first.items():
                    rows = torch.cat([row[None], rest[name]]) if rest else row[None]
                    log_p = rows.gather(1, ids[:, None]).clamp(min=1e-30).log().sum().item()
                    of_options[name][option] = round(log_p, 3)
            for name, row in first.items():
                if question.options:
                    said = max(of_options[name], key=of_options[name].get)
                    answers[name].append(
                        [question.kind, question.value, said, said == question.value, of_options[name]]
                    )
                else:
                    stream.restore(asked)
                    said = generate(stream, name, row, question, tokenizer)
                    answers[name].append([question.kind, question.value, said, ruler.score(said, question.value)])
    return {name: ({"answers": answers[name]}, most[name], tokens) for name in answers}


def generate(stream: Stream, name: str, row: Tensor, question: Question, tokenizer: PreTrainedTokenizerBase) -> str:
    """Goes on greedily after the probabilities (V,), until all strings are there, which no further token can change."""
    said = [int(row.argmax())]
    while len(said) < question.generated and said[-1] != tokenizer.eos_token_id:
        if ruler.score(tokenizer.decode(said), question.value) == 1:
            break
        said.append(int(stream.after(tensor(said[-1:]))[name][-1].argmax()))
    return tokenizer.decode(said, skip_special_tokens=True)


def perform(
    task: Task, reader: Reader, chains: dict[str, list[Link]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, tuple[dict[str, Any], int, int]]:
    """Reads a text: for each chain the result, the bytes of its state and the tokens."""
    if task.ids is None:
        return ask(Stream(reader, chains), task.parts, tokenizer)
    wanted, found = {i for x in task.answers for i in range(x.begin - 1, x.end)}, {}
    for name, scores in read_text(reader, chains, task.ids, wanted).items():
        blocks = [round(x.mean().item(), 5) for x in scores.losses.split(PER_BLOCK)]
        result = {"answers": []} if task.answers else {"losses": blocks}
        for answer in task.answers:
            said, is_right = judge(answer, task.ids, scores.tops, tokenizer)
            log_p = -scores.losses[answer.begin - 1 : answer.end - 1].sum().item()
            result["answers"].append([answer.kind, answer.value, said, is_right, round(log_p, 3)])
        found[name] = result, scores.state_bytes, len(task.ids)
    return found

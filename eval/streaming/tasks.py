"""What is read and asked, and the answers: facts, RULER's needles, BABILong, chats."""

import argparse
import hashlib
import json
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, tensor
from transformers import PreTrainedTokenizerBase

from eval.streaming import babilong, chat, ruler
from eval.streaming.facts import Answer, judge, make_text
from eval.streaming.readers import Reader
from eval.streaming.reading import Question, load_texts

LENGTHS = {"facts": [700, 1200, 2000, 3000], "ruler": [1024, 4096], "babilong": [0, 1024, 2048, 4096]}


class Task(NamedTuple):
    """A text of a record: ids with facts in them, contexts with questions after each, or the number of a chat."""

    text: str
    ids: Tensor | None = None
    answers: list[Answer] = []
    parts: list[tuple[str, list[Question]]] = []
    chat: tuple[int | str, str] | None = None  # its number, or the seed of what is told; and the text before it


def make_tasks(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """Makes all texts of a task."""
    if args.task == "babilong":
        make = partial(babilong.make_stories, args.stories, args.text[0], tokenizer, args.number)
        kinds = product(args.lengths, babilong.BEGUN)
        return [Task(f"{kind}, {length} tokens", parts=make(kind, length)) for length, kind in kinds]
    longest = max(args.lengths, default=0)
    needed = {"facts": longest, "ruler": 2 * longest, "chat": chat.TOKENS, "told": chat.TOKENS}
    texts = {}
    for path in args.text:
        texts |= load_texts(path, tokenizer, needed[args.task], args.place)
    if not texts:
        raise ValueError(f"--text {args.text[0]} has no text of {needed[args.task]} tokens")
    names, tasks = sorted(texts), []
    if args.task == "facts":
        for i, length in enumerate(args.lengths):
            name = names[i * len(names) // len(args.lengths)]
            filler, seed = tokenizer.decode(texts[name][:length]), f"{args.data} {length} {args.seed}"
            tasks.append(Task(f"{name}, {length} tokens", *make_text(filler, tokenizer, seed)))
        return tasks
    fillers = [tokenizer.decode(texts[name]) for name in names]
    if args.task == "told":
        told = [(f"{args.data} {i} {args.seed}", x) for i, x in enumerate(fillers)]
        return [Task(f"{name}, told", chat=x) for name, x in zip(names, told, strict=True)][: args.number]
    if args.task == "chat":
        chats = zip(range(len(chat.CHATS)), cycle(fillers), strict=False)
        return [Task(f"chat {i}", chat=(i, filler)) for i, filler in chats]
    make = partial(ruler.make_prompts, tokenizer, args.number, fillers, args.seed)
    return [
        Task(f"{kind}, {length} tokens", parts=make(kind, length)) for length, kind in product(args.lengths, args.kinds)
    ]


def digest(task: Task) -> str:
    """Returns twelve letters that differ where what is read and asked differs."""
    asked = [task.text, task.ids if task.ids is None else task.ids.tolist(), task.answers, task.parts, task.chat]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]


def tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Returns the ids (T,) of a text."""
    return tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def ask(reader: Reader, question: Question, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Asks after a context, whose last token was not read: kind, right value, what was said, whether it is right or
    which share of it, and with options the log probability of each.
    """
    kind, text, value, options, generated = question
    ids = tokenize(text, tokenizer)
    reader.start_prompt()
    if not options:

        def is_found(said: list[int]) -> bool:
            return ruler.score(tokenizer.decode(said), value) == 1  # no further token can change that

        said = tokenizer.decode(reader.generate(ids, generated, is_found), skip_special_tokens=True)
        return [kind, value, said, ruler.score(said, value)]
    reader.read_on(ids[:-1])
    log_p = {}
    for option in options:
        wanted = tokenize(f" {option}", tokenizer)
        rows = reader.after(torch.cat([ids[-1:], wanted[:-1]]))
        log_p[option] = round(rows.gather(1, wanted[:, None]).sum().item(), 3)
    said = max(log_p, key=log_p.get)
    return [kind, value, said, said == value, log_p]


def ask_facts(reader: Reader, task: Task, tokenizer: PreTrainedTokenizerBase) -> list[list[Any]]:
    """Reads a text, and asks each of its questions at its place; the text goes on with the right answer."""
    found, start = [], 0
    for answer in task.answers:
        reader.read_on(task.ids[start : answer.asked])
        reader.start_prompt()
        reader.read_on(task.ids[answer.asked : answer.begin - 1])
        start = answer.begin - 1
        log_p = reader.after(task.ids[start : answer.end])
        tops = {start + i: top for i, top in enumerate(log_p.argmax(1).tolist())}
        said, is_right = judge(answer, task.ids, tops, tokenizer)
        of_value = log_p[:-1].gather(1, task.ids[answer.begin : answer.end, None]).sum().item()
        found.append([answer.kind, answer.value, said, is_right, round(of_value, 3)])
    return found


def perform(task: Task, reader: Reader, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Any], int, int]:
    """Reads a text: the result, the bytes of the reader's state, and the tokens."""
    if task.chat is not None:
        answer = chat.answers if isinstance(task.chat[0], int) else chat.told_answers
        found = answer(reader, *task.chat, tokenizer)
        return {"answers": found}, reader.state_bytes(), reader.start
    reader.begin()
    if task.answers:
        found = ask_facts(reader, task, tokenizer)
        return {"answers": found}, reader.state_bytes(), len(task.ids)
    found, most, tokens = [], 0, 0
    for context, (question,) in task.parts:
        reader.begin()
        ids = tokenize(context, tokenizer)
        reader.read_on(ids)
        found.append(ask(reader, question, tokenizer))
        most, tokens = max(most, reader.state_bytes()), tokens + len(ids)
    return {"answers": found}, most, tokens

"""Conversations: does a memory harm a chat, and does a chat find what it was told?

Twelve conversations of five turns are in `chats.txt`.

The first six lie within a window of 256 tokens; the others follow a text of TOKENS, which the user's first message
holds. "new" is the model's answer after its own earlier answers: right if it equals none of them. "given" has the log
probability of the given answer after the given earlier answers, which were read as any text.

In a told chat the first message tells the facts of `facts.py`, a text of TOKENS follows, and each question is asked
after it, in a branch of its own.
"""

import copy
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, tensor
from transformers import PreTrainedTokenizerBase

from eval.streaming.facts import draw_facts
from eval.streaming.readers import Reader

CHATS = [x.split("\n") for x in (Path(__file__).parent / "chats.txt").read_text("utf-8").strip().split("\n\n")]
TOKENS, MOST = 1400, 28  # of the text, and of an answer


def turns(number: int, text: str) -> tuple[list[str], list[str]]:
    """Returns what was said before a conversation, and its lines: of the user and of the assistant, in turn."""
    is_long = number >= len(CHATS) // 2
    return [f"Here is a text.\n\n{text}", "Thank you. I have read it."] if is_long else [], CHATS[number]


class Chat:
    """A reader and what it has read of a conversation."""

    def __init__(self, reader: Reader, tokenizer: PreTrainedTokenizerBase):
        reader.begin()
        self.reader, self.tokenizer, self.read, self.said = reader, tokenizer, "", []

    def prompt(self, messages: list[str], answer: bool = True) -> Tensor:
        """Begins a prompt, and returns its ids (T,): the messages, of user and assistant in turn, after what was read,
        with the header of an answer.
        """
        self.reader.start_prompt(messages[-1])
        roles = [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(messages)]
        whole = self.tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=answer)
        ids = tensor(self.tokenizer(whole.removeprefix(self.read), add_special_tokens=False).input_ids)
        self.read = whole
        if self.said:  # its last token was not read yet; an end token is in the template too
            ids = torch.cat([tensor(self.said[-1:]), ids[self.said[-1] in self.reader.ends :]])
        return ids

    def answer(self, messages: list[str]) -> str:
        """Returns the answer to the last message."""
        self.said = self.reader.generate(self.prompt(messages), MOST)
        answer = self.tokenizer.decode(self.said, skip_special_tokens=True)
        self.read += answer
        return answer


def answers(reader: Reader, number: int, text: str, tokenizer: PreTrainedTokenizerBase) -> list[list[Any]]:
    """Returns the answers of a conversation: kind, given answer, what was said, whether it is right, log probability
    for each token.
    """
    before, lines = turns(number, text)
    told, own, given = lines[1::2], [], []

    def messages(earlier: list[str]) -> list[str]:
        return [*before, *(x for i, y in enumerate(earlier) for x in (lines[2 * i], y)), lines[2 * len(earlier)]]

    talk = Chat(reader, tokenizer)
    for _ in told:
        own.append(talk.answer(messages(own)))
    talk = Chat(reader, tokenizer)
    for turn, line in enumerate(told):
        ids = talk.prompt(messages(told[:turn]))
        answer = tensor(tokenizer(line, add_special_tokens=False).input_ids)
        reader.start_prompt()
        reader.read_on(ids[:-1])
        log_p = reader.after(torch.cat([ids[-1:], answer[:-1]])).gather(1, answer[:, None])
        given.append(round(log_p.mean().item(), 4))
        reader.read_on(torch.cat([ids[-1:], answer]))
        talk.read += line
    new = [x.strip() not in [y.strip() for y in own[:i]] for i, x in enumerate(own)]
    return [["new", told[i], x, new[i]] for i, x in enumerate(own)] + [
        ["given", told[i], "", False, x] for i, x in enumerate(given)
    ]


def told_answers(reader: Reader, seed: str, text: str, tokenizer: PreTrainedTokenizerBase) -> list[list[Any]]:
    """Returns the answers of a told chat: kind, value, what was said, whether it holds the value; of an absent one,
    whether it holds no told value.
    """
    told, questions = draw_facts(random.Random(seed))
    messages = [" ".join(told), "Go on.", f"Here is a text.\n\n{text}", "Thank you. I have read it."]
    talk, found = Chat(reader, tokenizer), []
    reader.read_on(talk.prompt(messages, answer=False))
    for kind, question, value, values in questions:
        with reader.branch():
            said = copy.copy(talk).answer([*messages, f"Complete this sentence: {question} ..."])
        is_right = value in said if kind != "absent" else not any(x in said for x in values)
        found.append([kind, value, said, is_right])
    return found

"""Twelve conversations of five turns, in `chats.txt`: does a memory harm a chat?

The first six lie within a window of 256 tokens; the others follow a text of TOKENS, which the user's first message
holds. "new" is the model's answer after its own earlier answers: right if it equals none of them. "given" has the log
probability of the given answer after the given earlier answers, which were read as any text.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eval.streaming.readers import Reader

CHATS = [x.split("\n") for x in (Path(__file__).parent / "chats.txt").read_text("utf-8").strip().split("\n\n")]
TOKENS, MOST = 1400, 28  # of the text, and of an answer


def turns(number: int, text: str) -> tuple[list[str], list[str]]:
    """Returns what was said before a conversation, and its lines: of the user and of the assistant, in turn."""
    is_long = number >= len(CHATS) // 2
    return [f"Here is a text.\n\n{text}", "Thank you. I have read it."] if is_long else [], CHATS[number]


def answers(reader: Reader, number: int, text: str, tokenizer: PreTrainedTokenizerBase) -> list[list[Any]]:
    """Returns the answers of a conversation: kind, given answer, what was said, whether it is right, log probability
    for each token.
    """
    before, lines = turns(number, text)
    own, given = [], []

    def prompt(earlier: list[str], turn: int, read: str) -> torch.Tensor:
        """Returns the ids of all up to an assistant's turn but the text that was read, and that text."""
        said = [*before, *(x for i, y in enumerate(earlier) for x in (lines[2 * i], y)), lines[2 * turn]]
        messages = [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(said)]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return torch.tensor(tokenizer(whole.removeprefix(read), add_special_tokens=False).input_ids), whole

    reader.begin()
    said, read = [], ""
    for turn in range(len(lines) // 2):
        ids, whole = prompt(own, turn, read)
        if said:  # its last token was not read yet; an end token is in the template too
            ids = torch.cat([torch.tensor(said[-1:]), ids[said[-1] in reader.ends :]])
        said = reader.generate(ids, MOST)
        own.append(tokenizer.decode(said, skip_special_tokens=True))
        read = whole + own[-1]
    reader.begin()
    read = ""
    for turn in range(len(lines) // 2):
        ids, whole = prompt(lines[1 : 2 * turn : 2], turn, read)
        answer = torch.tensor(tokenizer(lines[2 * turn + 1], add_special_tokens=False).input_ids)
        reader.read_on(ids[:-1])
        log_p = reader.after(torch.cat([ids[-1:], answer[:-1]])).gather(1, answer[:, None])
        given.append(round(log_p.mean().item(), 4))
        reader.read_on(torch.cat([ids[-1:], answer]))
        read = whole + lines[2 * turn + 1]
    told = lines[1::2]
    new = [x.strip() not in [y.strip() for y in own[:i]] for i, x in enumerate(own)]
    return [["new", told[i], x, new[i]] for i, x in enumerate(own)] + [
        ["given", told[i], "", False, x] for i, x in enumerate(given)
    ]

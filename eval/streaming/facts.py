"""Texts that tell facts, go on with a filler, and ask: 20 questions of five kinds each.

begun     the sentence that told the fact is begun again
cloze     it is asked for with at most two words in common with the sentence that told it
pair      the same was told of two persons in the same words; one of the two is asked for
updated   the sentence was told twice with two values: the last counts
absent    it was told of others, not of this person: no told value may be the answer
"""

import json
import random
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, tensor
from transformers import PreTrainedTokenizerBase

EACH = 4  # questions of each kind in a text
FACTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
WHO = FACTS["who"].split()
VALUES = {kind: words.split() for kind, words in FACTS["values"].items()}  # numbers are drawn
# The kind of the value, the sentence that tells a fact up to its value, and one that asks for it in other words.
SENTENCES = [tuple(x) for x in FACTS["sentences"]]


class Answer(NamedTuple):
    """A question's place in a text and what would be right."""

    kind: str
    asked: int  # the first token of the question
    begin: int  # the first token of the answer
    end: int
    value: str  # the right value; of an absent one, one that was told of another
    told: list[str]  # all values of its kind that were told


def draw_facts(choose: random.Random) -> tuple[list[str], list[tuple[str, str, str, list[str]]]]:
    """Draws the told sentences in their order, and the questions: kind, how it is asked, value, told values."""
    who, told, updates, asked = choose.sample(WHO, len(WHO)), [], [], []
    values = {kind: choose.sample(x, len(x)) for kind, x in VALUES.items()}
    given = {kind: [] for kind in VALUES}

    def tell(sentence: tuple[str, str, str], person: str, to: list[str]) -> str:
        kind = sentence[0]
        given[kind].append(f"{choose.randrange(10**4, 10**5)}" if kind == "number" else values[kind].pop())
        to.append(f"{sentence[1].format(who=person)} {given[kind][-1]}.")
        return given[kind][-1]

    for kind in ("begun", "cloze", "pair", "updated"):
        for sentence in choose.sample(SENTENCES, EACH):
            person = who.pop()
            value = tell(sentence, person, told)
            if kind == "pair":
                other = who.pop()
                of_other = tell(sentence, other, told)
                person, value = choose.choice([(person, value), (other, of_other)])
            elif kind == "updated":
                value = tell(sentence, person, updates)
            asked.append((kind, sentence, person, value))
    for sentence in choose.sample([x for x in SENTENCES if given[x[0]] and x[0] != "number"], EACH):
        asked.append(("absent", sentence, who.pop(), given[sentence[0]][0]))
    choose.shuffle(told)
    choose.shuffle(updates)
    choose.shuffle(asked)
    questions = [
        (kind, sentence[2 if kind == "cloze" else 1].format(who=person), value, given[sentence[0]])
        for kind, sentence, person, value in asked
    ]
    return told + updates, questions


def make_text(filler: str, tokenizer: PreTrainedTokenizerBase, seed: str) -> tuple[Tensor, list[Answer]]:
    """Returns the ids (T,) of a text with its facts, the filler and the questions, and the answers."""
    told, questions = draw_facts(random.Random(seed))
    ids, answers = [], []

    def add(text: str) -> int:
        ids.extend(tokenizer(text, add_special_tokens=False)["input_ids"])
        return len(ids)

    add(f"{' '.join(told)}\n\n{filler}\n\n")
    for kind, question, value, values in questions:
        asked, begin = len(ids), add(question)
        answers.append(Answer(kind, asked, begin, add(f" {value}"), value, values))
        add(". ")
    return tensor(ids), answers


def judge(answer: Answer, ids: Tensor, tops: dict[int, int], tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Returns what was answered, and whether it is right; tops: the most probable token after a place in the text.

    An answer is right if all its tokens are the most probable ones, but for a space that is a token of its own. That to
    an absent fact is right if it does not begin as a value that was told of another.
    """
    if answer.kind == "absent":
        top = tops[answer.begin - 1]
        first = {tokenizer(f" {value}", add_special_tokens=False)["input_ids"][0] for value in answer.told}
        return tokenizer.decode([top]), top not in first
    places = [i for i in range(answer.begin, answer.end) if tokenizer.decode(ids[i : i + 1]).strip()]
    return tokenizer.decode([tops[i - 1] for i in places]), all(tops[i - 1] == ids[i] for i in places)

"""Generated texts for the fit of a memory, beside real texts: facts are told, a filler follows, the facts are asked
for.

A list fitted only to novels does not learn to trust entries that answer a question. A list fitted only to facts that
were all told does not learn to distrust an entry about another person.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

FILLERS = (200, 500, 700, 1000, 1500)  # tokens of text between telling and asking
FORMS = 2 * ("alone", "pair", "updated", "absent")  # of the facts of a text
PEOPLE = "Thessaly Gideon Percival Lucasta Ambrose Octavia Phineas Drusilla Leander Cressida Evander Horatio".split()
KINDS = {
    "name": "Marguerite Tobias Ingrid Rolando Philippa Desmond Yolanda Barnaby Winifred Anselm Beatrix Cornelius "
    "Dorothea".split(),
    "place": "Lisbon Valparaiso Bergen Windhoek Cartagena Antwerp Nagasaki Tbilisi Casablanca Heidelberg Reykjavik "
    "Trieste".split(),
    "thing": "telescope mandolin hammock lantern typewriter parachute saxophone microscope kettle tapestry compass "
    "violin".split(),
}
# The kind of a fact, how it is told up to its value, how it is asked for, and how the answer begins.
FACTS = [
    (
        "name",
        "The neighbour across the street from {who} is",
        "Who lives across the street from {who}?",
        "The person across the street from {who} is",
    ),
    ("name", "The captain of {who}'s team is named", "Who is captain in {who}'s team?", "The captain of {who} is"),
    ("name", "{who} was taught to swim by", "Who taught {who} to swim?", "{who} learned to swim from"),
    ("name", "{who} named the parrot", "What is {who}'s parrot called?", "The parrot of {who} is called"),
    ("place", "{who} grew up in", "In which city did {who} grow up?", "{who} is from"),
    ("place", "The conference of {who} will be held in", "Where is {who}'s conference?", "{who}'s conference is in"),
    ("place", "The parents of {who} moved to", "Where are {who}'s parents?", "The parents of {who} live in"),
    ("thing", "At the market {who} bought a", "What did {who} buy at the market?", "{who} went to buy a"),
    ("thing", "In the attic of {who} there is a", "What does {who} keep in the attic?", "The attic of {who} has a"),
    ("number", "The train of {who} leaves from platform", "Which platform is {who}'s?", "{who} leaves from platform"),
    ("number", "{who} gave the alarm the password", "What is {who}'s password?", "The password of {who} is"),
    ("number", "{who} has the member number", "What is {who}'s membership number?", "{who} is a member with number"),
]


def make_recalls(
    documents: Sequence[Tensor], tokenizer: PreTrainedTokenizerBase, number: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Makes `number` texts with recalls, whose fillers are parts of the documents, ids (T,); every other text is a
    conversation. Returns as `make_recall` does.
    """
    choose, recalls = random.Random(seed), []
    for i in range(number):
        part = documents[choose.randrange(len(documents))]
        length = FILLERS[i // 2 % len(FILLERS)]
        start = choose.randrange(max(1, len(part) - length))
        recalls.append(make_recall(tokenizer, tokenizer.decode(part[start : start + length]), choose, i % 2 == 0))
    return recalls


def draw_facts(choose: random.Random) -> tuple[list[str], list[tuple[str, str, str, str]]]:
    """Draws the told sentences in their order, and for each fact: how it is told and asked for, how the answer begins,
    and the answer.

    A pair is told of two persons. An updated fact is told twice: the last value counts. An absent fact is told of
    another person: its answer is a value that was not told.
    """
    people, told, updates, asked = choose.sample(PEOPLE, len(PEOPLE)), [], [], []
    values = {kind: choose.sample(x, len(x)) for kind, x in KINDS.items()}
    for form, (kind, *texts) in zip(FORMS, choose.sample(FACTS, len(FORMS)), strict=True):
        person, *value = people.pop(), *(_draw(kind, values, choose) for _ in range(2))
        other = people.pop() if form in ("pair", "absent") else person
        told.append(f"{texts[0].format(who=other)} {value[0]}.")
        if form == "pair":
            told.append(f"{texts[0].format(who=person)} {value[1]}.")
        elif form == "updated":
            updates.append(f"{texts[0].format(who=person)} {value[1]}.")
        asked.append((*(x.format(who=person) for x in texts), value[form != "alone"]))
    for x in (told, updates, asked):
        choose.shuffle(x)
    return told + updates, asked


def _draw(kind: str, values: dict[str, list[str]], choose: random.Random) -> str:
    """Draws a value that is not drawn again; numbers have two to six digits."""
    if kind in values:
        return values[kind].pop()
    digits = choose.randint(2, 6)
    return str(choose.randrange(10 ** (digits - 1), 10**digits))


def make_recall(
    tokenizer: PreTrainedTokenizerBase, filler: str, choose: random.Random, is_chat: bool
) -> tuple[Tensor, Tensor]:
    """Makes a text in which facts are told, `filler` is read, and the facts are asked for in a conversation, or told
    again in prose. Returns its ids (T,), and (T,) bool, True at the tokens of the answers.
    """
    told, facts = draw_facts(choose)
    turns = [" ".join(told), filler, " ".join(f"{told} {value}." for told, _, _, value in facts)]
    if is_chat:
        turns = [f"Some things to know. {turns[0]}", "Thank you, I will remember that."]
        turns += [f"Please read this.\n\n{filler}", "I have read it."]
        turns += [turn for _, question, start, value in facts for turn in (question, f"{start} {value}.")]
    if tokenizer.chat_template is None or not is_chat:
        text = "\n\n".join(turns)
    else:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    is_answer = torch.zeros(len(encoded.input_ids), dtype=torch.bool)
    for told, _, start, value in facts:
        start = f"{start if is_chat else told} "
        begin = text.rindex(f"{start}{value}.") + len(start)
        overlaps = [a < begin + len(value) and b > begin for a, b in encoded.offset_mapping]
        is_answer |= torch.tensor(overlaps)
    return torch.tensor(encoded.input_ids), is_answer

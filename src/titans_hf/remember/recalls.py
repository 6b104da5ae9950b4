"""Made texts to which a memory is fitted beside real ones: facts are told, a filler follows, the facts are asked for.

A list that is fitted to novels alone does not learn to trust what answers a question.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

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

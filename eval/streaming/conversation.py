"""Long conversations: in eight sessions of a chat a user tells of himself and of others; 25 questions follow.

told      the fact was told once
changed   it was told again, in a later session, with another value: the last counts
persons   the same was told of two persons with two values; one of the two is asked for

Each question has four values of one kind as options, which were all told in this conversation: the old value and that
of the other person are among them. Between the facts the assistant reads a text aloud.
"""

import random
from bisect import bisect_right

from transformers import PreTrainedTokenizerBase

from eval.streaming.facts import VALUES, WHO
from eval.streaming.reading import Question

SESSIONS, SESSION_TOKENS, OPTIONS, PEOPLE = 8, 400, 4, 5  # people: so many beside the user
TOKENS = SESSIONS * SESSION_TOKENS
EACH = {"persons": 7, "changed": 8, "told": 10}  # questions of a kind: 25
# The kind of the value, what follows a person when it is told, and what is asked.
SENTENCES = [
    ("thing", "bought a", "What did {} buy?"),
    ("thing", "repaired a", "What did {} repair?"),
    ("thing", "lost a", "What did {} lose?"),
    ("thing", "inherited a", "What did {} inherit?"),
    ("place", "moved to", "Where did {} move to?"),
    ("place", "took the train to", "Where did {} take the train to?"),
    ("place", "grew up in", "Where did {} grow up?"),
    ("name", "shared a desk with", "With whom did {} share a desk?"),
    ("name", "went dancing with", "With whom did {} go dancing?"),
    ("name", "learnt fencing from", "From whom did {} learn fencing?"),
    ("number", "rented locker", "Which locker did {} rent?"),
    ("number", "paid for the phone number", "Which phone number did {} pay for?"),
]


def draw_facts(choose: random.Random) -> tuple[list[list[str]], list[Question]]:
    """Draws what is told in each session, and the questions: two lines, what is asked and the begun answer."""
    values = {kind: choose.sample(x, len(x)) for kind, x in VALUES.items()}
    values["number"] = [str(x) for x in choose.sample(range(10**4, 10**5), 18)]
    people = ["I", *choose.sample(WHO, PEOPLE)]
    order = {sentence: choose.sample(people, len(people)) for sentence in SENTENCES}
    free = [(x, order[x][i]) for i in range(len(people)) for x in choose.sample(SENTENCES, len(SENTENCES))]
    sessions, asked, given = [[] for _ in range(SESSIONS)], [], {kind: [] for kind in values}

    def tell(sentence: tuple[str, str, str], person: str, within: range) -> tuple[str, int]:
        """Tells it in one of the sessions that have the fewest facts, and returns the value and the session."""
        session = min(within, key=lambda i: (len(sessions[i]), choose.random()))
        value = values[sentence[0]].pop()
        given[sentence[0]].append(value)
        sessions[session].append(f"{person} {sentence[1]} {value}.")
        return value, session

    def take(wanted: tuple[str, str, str] | None = None) -> tuple[tuple[str, str, str], str]:
        """Draws a sentence, whose kind has two values left, and a person of whom it was not told."""
        found = next(x for x in free if wanted in (None, x[0]) and len(values[x[0][0]]) > 1)
        free.remove(found)
        return found

    for kind, number in EACH.items():
        for _ in range(number):
            sentence, person = take()
            rivals, within = [], range(SESSIONS)
            if kind == "changed":
                old, session = tell(sentence, person, range(SESSIONS - 1))
                rivals, within = [old], range(session + 1, SESSIONS)
            elif kind == "persons":
                rivals = [tell(sentence, take(sentence)[1], within)[0]]
            asked.append((kind, sentence, person, tell(sentence, person, within)[0], rivals))
    for session in sessions:
        choose.shuffle(session)
    choose.shuffle(asked)
    questions = []
    for kind, (of_kind, predicate, question), person, value, rivals in asked:
        others = choose.sample([x for x in given[of_kind] if x not in (value, *rivals)], OPTIONS - 1 - len(rivals))
        options = choose.sample([value, *rivals, *others], OPTIONS)
        begun = f"{'You' if person == 'I' else person} {predicate}"
        questions.append(Question(kind, f"{question.format(person)}\n{begun}", value, options))
    return sessions, questions


def make_conversation(text: str, tokenizer: PreTrainedTokenizerBase, seed: str) -> tuple[str, list[Question]]:
    """Returns sessions of SESSION_TOKENS, in which the text is read, and the questions, each a session of its own."""
    sessions, questions = draw_facts(random.Random(seed))
    words, chat, asked = text.split(), "", []
    for facts in sessions:

        def session(size: int, facts: list[str] = facts) -> str:
            turns = [(f"{fact} Please read on.", words[i * size : (i + 1) * size]) for i, fact in enumerate(facts)]
            messages = [
                {"role": role, "content": x}
                for told, read in turns
                for role, x in (("user", told), ("assistant", " ".join(read)))
            ]
            return tokenizer.apply_chat_template(messages, tokenize=False)

        sizes = range(1, SESSION_TOKENS)  # the largest that fits
        size = bisect_right(sizes, SESSION_TOKENS, key=lambda n: len(tokenizer(session(n)).input_ids))
        chat += session(size)
        del words[: size * len(facts)]
    for question in questions:
        text, begun = question.text.split("\n")
        message = {"role": "user", "content": text}
        opened = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        asked.append(question._replace(text=opened + begun))
    return chat, asked

"""Made recalls: answers are marked, values of absent facts were not told, nothing is shared with the benchmark."""

import random
from itertools import chain

import torch

from eval.streaming import facts
from titans_hf.cli.training.tokenizer import byte_tokenizer
from titans_hf.remember.fit import recalls

FILLER = "It rained on the moor all day."


def runs(sentence: str) -> set[tuple[str, ...]]:
    words = sentence.format(who="{}").split()
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def test_nothing_is_shared_with_the_benchmark():
    """No value and no person of the fit is one of the benchmark's, no sentence has three words in common with one."""
    own = set(recalls.PEOPLE).union(*recalls.KINDS.values())
    assert not own & set(facts.WHO).union(*facts.VALUES.values())
    of_fit = set().union(*(runs(x) for fact in recalls.FACTS for x in fact[1:]))
    assert not of_fit & set().union(*(runs(x) for sentence in facts.SENTENCES for x in sentence[1:]))


def test_answers():
    """The marked tokens are the answers; an absent one's value is not told, and an updated one's last value counts."""
    tokenizer, forms = byte_tokenizer(), set()
    chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    for seed in range(8):
        for template, is_chat in ((None, True), (chat_template, True), (chat_template, False)):
            tokenizer.chat_template = template
            ids, is_answer = recalls.make_recall(tokenizer, FILLER, random.Random(seed), is_chat)
            told, asked = recalls.draw_facts(random.Random(seed))
            before, _, after = tokenizer.decode(ids).partition(FILLER)
            assert all(x in before for x in told) and ("<user>" in before) == (is_chat and template is not None)
            values = [value for *_, value in asked]
            assert tokenizer.decode(ids[is_answer]) == "".join(values)
            begin = after.index(asked[0][2 if is_chat else 0])
            assert begin < after.index(values[0], begin) < after.index(asked[1][2 if is_chat else 0])
        for statement, _, _, value in asked:
            own = [x for x in told if x.startswith(f"{statement} ")]
            assert not own or own[-1] == f"{statement} {value}."
            same = sum(x.split()[-1] == f"{value}." for x in told)
            forms.add((len(own), same))
            assert same == bool(own)
    assert forms == {(0, 0), (1, 1), (2, 1)}  # absent; alone or one of a pair; updated


def test_a_seed_makes_the_same_recalls():
    """Recalls depend on documents, number and seed alone."""
    documents = [torch.arange(4, 250).repeat(4)]
    first, again, other = (recalls.make_recalls(documents, byte_tokenizer(), 4, seed) for seed in (0, 0, 1))
    assert all(torch.equal(x, y) for x, y in zip(chain(*first), chain(*again), strict=True))
    assert not torch.equal(first[0][0], other[0][0])

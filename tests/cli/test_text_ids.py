"""Texts in windows have the ids of the whole text, and answers have the text of prompt and answer together."""

import random

import pytest
from vocabularies import byte_level, sentencepiece, text_of, unigram, wordpiece

from titans_hf.cli.shared import text_ids
from titans_hf.cli.shared.text_ids import decode_answer, encode, encode_in_windows
from titans_hf.cli.training.tokenizer import byte_tokenizer

TOKENIZERS = [sentencepiece, unigram, byte_level, wordpiece, byte_tokenizer]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_windows_have_the_ids_of_the_whole_text(make, monkeypatch):
    """Whatever the pieces in which a text comes, its ids are those of one call of the tokenizer."""
    tokenizer, rng = make(), random.Random(0)
    monkeypatch.setattr(text_ids, "WINDOW", 400)
    monkeypatch.setattr(text_ids, "OVERLAP", 60)
    texts = [text_of(seed, 600) for seed in range(8)]
    texts += ["", " ", "word" + " " * 300 + "word"]
    if make is not unigram:  # which weighs all of a repeated letter at once
        texts += ["a" * 3000, " " * 3000, "東" * 2000, "word" + " " * 2000 + "word", "x" + "\n" * 2000]
    for text in texts:
        pieces, rest = [], text
        while rest:
            length = rng.choice([1, 7, 300, 1000])
            pieces.append(rest[:length])
            rest = rest[length:]
        found = list(encode_in_windows(tokenizer, pieces))
        assert [x for ids in found for x in ids] == encode(tokenizer, text).input_ids


def test_windows_bound_the_work(monkeypatch):
    """An ordinary text is tokenized once, but for the overlaps."""
    tokenizer, lengths, works = sentencepiece(), [], text_ids.encode
    monkeypatch.setattr(text_ids, "encode", lambda x, text, **y: lengths.append(len(text)) or works(x, text, **y))
    text = "the key was red and the door was open. " * 10_000
    assert sum(len(x) for x in encode_in_windows(tokenizer, [text[i : i + 999] for i in range(0, len(text), 999)]))
    assert max(lengths) < 20_000 and sum(lengths) < 1.08 * len(text)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_an_answer_is_what_it_adds_to_its_prompt(make):
    """Prompt and answer together are the decoded text, with the space between two words."""
    tokenizer, texts = make(), ["the key was red and (a small one)", "the captain's lamp, and red door open"]
    for text in texts:
        ids = encode(tokenizer, text).input_ids
        whole = tokenizer.decode(ids)
        for cut in range(1, len(ids)):
            prompt, answer = ids[:cut], [*ids[cut:], tokenizer.eos_token_id]
            found = decode_answer(tokenizer, prompt, answer)
            assert tokenizer.decode(prompt) + found == whole
            assert found.replace(" ", "") == tokenizer.decode(ids[cut:]).replace(" ", "").removeprefix("##")

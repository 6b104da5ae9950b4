"""Answers have the text of prompt and answer together."""

import pytest
from vocabularies import sentencepiece, wordpiece

from titans_hf.cli.shared.text_ids import decode_answer, encode
from titans_hf.cli.training.tokenizer import byte_tokenizer

TOKENIZERS = [sentencepiece, wordpiece, byte_tokenizer]


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

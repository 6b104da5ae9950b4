"""RULER's needles by lm-eval's own generator, with a local text in place of its essays."""

import contextlib
import io
import random
from typing import Any
from unittest import mock

import numpy as np
from transformers import PreTrainedTokenizerBase

from eval.streaming.babilong import split_sentences
from eval.streaming.reading import Question

GENERATED = 128  # tokens of an answer, at most
KINDS = {
    "niah_single_1": {"type_haystack": "repeat"},
    "niah_single_2": {},
    "niah_single_3": {"type_needle_v": "uuids"},
    "niah_multikey_1": {"num_needle_k": 4},
    "niah_multivalue": {"num_needle_v": 4},
}


def make_samples(
    kind: str, tokenizer: PreTrainedTokenizerBase, length: int, number: int, text: str, seed: str
) -> list[dict[str, Any]]:
    """Draws lm-eval's samples of a kind: "input" and "gen_prefix", together at most `length` tokens with what is to be
    generated, and the list "outputs" of what an answer must contain.
    """
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        mock.patch("nltk.download"),  # of a splitter of sentences, instead of which ours is used
    ):
        from lm_eval.tasks.ruler import niah_utils, prepare_niah

        random.seed(seed)
        np.random.seed(random.randrange(2**32))
        options = {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers"} | KINDS[kind]
        words, at_once = text.split(), max(1, length >> 16)  # lm-eval adds 500 at a time, and tokenizes all anew
        grouped = [" ".join(words[i : i + at_once]) for i in range(0, len(words), at_once)]
        haystack = prepare_niah.get_haystack("repeat") if options["type_haystack"] == "repeat" else grouped
        fits = {"max_seq_length": length, "num_samples": number, "template": niah_utils.TEMPLATE}
        with mock.patch.object(prepare_niah, "cached_sent_tokenize", split_sentences):
            return prepare_niah.generate_samples(haystack, tokenizer, **fits, **options)


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, number: int, texts: list[str], seed: int, kind: str, length: int
) -> list[tuple[str, list[Question]]]:
    """Makes `number` prompts, each with its question and the beginning of the answer: from each text as many."""
    parts = []
    for i, text in enumerate(texts[:number]):
        of_text, own_seed = len(range(i, number, len(texts))), f"{kind} {length} {i} {seed}"
        for x in make_samples(kind, tokenizer, length, of_text, text, own_seed):
            context, _, asked = x["input"].rpartition("\n")
            question = Question(kind, f"\n{asked} {x['gen_prefix']}", x["outputs"], generated=GENERATED)
            parts.append((context, [question]))
    return parts


def score(said: str, outputs: list[str]) -> float:
    """Returns the share of the wanted strings that an answer contains, as RULER does."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return string_match_all(postprocess_pred([said]), [outputs])

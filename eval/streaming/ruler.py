"""RULER's niah_single 1 to 3, vt, cwe and fwe by lm-eval's own generators, with a local text in place of its essays."""

import contextlib
import io
import random
from typing import Any
from unittest import mock

import numpy as np
from transformers import PreTrainedTokenizerBase

from eval.streaming.babilong import split_sentences
from eval.streaming.reading import Question

GENERATED = {"niah_single_1": 128, "niah_single_2": 128, "niah_single_3": 128, "vt": 30, "cwe": 120, "fwe": 50}


def make_samples(
    task: str, tokenizer: PreTrainedTokenizerBase, length: int, number: int, text: str, seed: str
) -> list[dict[str, Any]]:
    """Draws lm-eval's samples of a task: "input" and "gen_prefix", together at most `length` tokens with what is to be
    generated, and the list "outputs" of what an answer must contain. Raises ValueError for a length that is too short.
    """
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        mock.patch("nltk.download"),  # of a splitter of sentences, instead of which ours is used
    ):
        from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils

        random.seed(seed)
        np.random.seed(random.randrange(2**32))
        cwe_utils.RNG.seed(seed)
        if task in ("vt", "cwe"):  # their generators never end, if the shortest prompt does not fit
            example, shortest = (vt_utils.generate_input_output(n, 1, 4, is_icl=n == 5)[0] for n in (5, 10))
            if task == "cwe":
                example, shortest = cwe_utils.generate_input_output(10, length)[:2]
            sizes = [len(tokenizer(x).input_ids) for x in (example, shortest)]
            if (task == "vt" and sizes[0] > 450) or sizes[1] + {"vt": 550, "cwe": 140}[task] > length:
                raise ValueError(f"--lengths {length} is too short for {task} in tokens of this tokenizer")
        fits = {"max_seq_length": length, "num_samples": number}
        if task == "vt":
            (example,) = vt_utils.sys_vartrack_w_noise_random(tokenizer, 1, 500, incremental=5)
            return vt_utils.sys_vartrack_w_noise_random(tokenizer, **fits, icl_example=example)
        if task == "cwe":
            return cwe_utils.sys_word_pair_random(**fits, tokenizer=tokenizer)
        if task == "fwe":
            return fwe_utils.sys_kwext(tokenizer, **fits)
        repeated = task == "niah_single_1"
        with mock.patch.object(prepare_niah, "cached_sent_tokenize", split_sentences):
            return prepare_niah.generate_samples(
                prepare_niah.get_haystack("repeat") if repeated else text.split(), tokenizer, **fits,
                template=niah_utils.TEMPLATE, type_haystack="repeat" if repeated else "essay", type_needle_k="words",
                type_needle_v="uuids" if task == "niah_single_3" else "numbers",
            )  # fmt: skip


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, number: int, texts: list[str], seed: int, task: str, length: int
) -> list[tuple[str, list[Question]]]:
    """Makes `number` prompts, each with the beginning of its answer as question: from each text as many."""
    parts, delimiter = [], "\n\n" if task == "cwe" else " "
    for i, text in enumerate(texts[:number]):
        of_text, own_seed = len(range(i, number, len(texts))), f"{task} {length} {i} {seed}"
        for x in make_samples(task, tokenizer, length, of_text, text, own_seed):
            question = Question(task, delimiter + x["gen_prefix"], x["outputs"], generated=GENERATED[task])
            parts.append((x["input"], [question]))
    return parts


def score(said: str, outputs: list[str]) -> float:
    """Returns the share of the wanted strings that an answer contains, as RULER does."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return string_match_all(postprocess_pred([said]), [outputs])

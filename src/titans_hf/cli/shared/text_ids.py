"""Converts text to token ids and back, in the same way for all commands."""

import itertools
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher

import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

WINDOW, OVERLAP = 1 << 14, 1 << 10  # characters of a window, and of its overlap with the next window


def normalize_newlines(text: str) -> str:
    r"""Replaces the line ends \r\n and \r by \n, as Python's text mode does."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def encode(tokenizer: PreTrainedTokenizerBase, texts: str | list[str], **options) -> BatchEncoding:
    """Tokenizes a text or a list of texts. No special token is added, and text that looks like one ("</s>") is text.

    options: keyword arguments of the tokenizer. Offsets refer to the text after `normalize_newlines`.
    """
    texts = normalize_newlines(texts) if isinstance(texts, str) else [normalize_newlines(text) for text in texts]
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False, **options)


def encode_in_windows(tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str]) -> Iterator[list[int]]:
    """Yields the token ids of a text that comes in pieces, the same ids as `encode` makes of the whole text, in limited
    memory.

    At the ends of a window, tokens may differ from the tokens of the whole text: many vocabularies put a space before
    any text. So windows overlap. The ids change from one window to the next in the middle of the longest run of tokens
    that both have. If that run is short, the overlap grows, up to the whole window. (Only a unigram vocabulary may
    split one letter repeated a thousand times differently.) A tokenizer without offsets gets the whole text at once.
    """
    if not tokenizer.is_fast:
        yield encode(tokenizer, "".join(pieces)).input_ids
        return
    text, tokens, new = "", [], ""  # the tokens of `text` that were not yielded; the text since
    for piece in pieces:
        new += piece
        if len(new) >= WINDOW:
            ids, text, tokens = _next_window(tokenizer, text, tokens, new)
            yield ids
            new = ""
    if new:
        ids, _, tokens = _next_window(tokenizer, text, tokens, new)
        yield ids
    yield [x for _, _, x in tokens]


Token = tuple[int, int, int]  # its first and its last place in the text, and its id


def _next_window(
    tokenizer: PreTrainedTokenizerBase, text: str, tokens: list[Token], new: str
) -> tuple[list[int], str, list[Token]]:
    """Returns the ids that end a window, then the text of the next window, which ends with `new`, and its tokens."""
    overlap = OVERLAP
    while True:
        start = max(0, len(text) - overlap)
        found = encode(tokenizer, text[start:] + new, return_offsets_mapping=True)
        after = [(*place, x) for place, x in zip(found.offset_mapping, found.input_ids, strict=True)]
        old = [(begin - start, end - start, x) for begin, end, x in tokens]
        first = sum(begin < 0 for begin, _, _ in old)
        num_after = sum(end <= len(text) - start for _, end, _ in after)
        run = SequenceMatcher(None, old[first:], after[:num_after], autojunk=False).find_longest_match()
        width = old[first + run.a + run.size - 1][1] - old[first + run.a][0] if run.size else 0
        if 2 * width >= overlap or (start == 0 and run.size):
            cut, cut_after = first + run.a + run.size // 2, run.b + run.size // 2
            return [x for _, _, x in old[:cut]], text[start:] + new, after[cut_after:]
        if start == 0:  # nothing in common: the new tokens from the first one that was not yielded
            begin = old[0][0] if old else 0
            return [], text + new, [token for token in after if token[0] >= begin]
        overlap *= 4


def pad_left(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns the ids of rows (B, T), padded on the left with 0, and their mask (B, T)."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(longest, 0, -1) <= lengths[:, None]).long()


def decode_answer(tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: list[int]) -> str:
    """Returns the text that an answer's ids add to a prompt's text, without special tokens. Both are decoded together:
    the space before an answer's first word would be lost if its ids were decoded alone.
    """
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *answer]))
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
    return whole[sum(1 for _ in same) :]

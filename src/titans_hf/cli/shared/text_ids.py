"""Converts text to token ids, in the same way for all commands."""

import io
from codecs import getincrementaldecoder

from transformers import BatchEncoding, PreTrainedTokenizerBase


def normalize_newlines(text: str) -> str:
    r"""Replaces the line ends \r\n and \r by \n, as Python's text mode does."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def newline_decoder() -> io.IncrementalNewlineDecoder:
    """Returns an incremental UTF-8 decoder that leaves out a byte order mark, and whose output has its line ends
    normalised as by `normalize_newlines`.

    Its `decode(data, final)` raises UnicodeDecodeError.
    """
    return io.IncrementalNewlineDecoder(getincrementaldecoder("utf-8-sig")(), translate=True)


def encode(tokenizer: PreTrainedTokenizerBase, texts: str | list[str], **options) -> BatchEncoding:
    """Tokenizes a text or a list of texts. No special token is added, and text that looks like one ("</s>") is text.

    options: keyword arguments of the tokenizer. Offsets refer to the text after `normalize_newlines`.
    """
    texts = normalize_newlines(texts) if isinstance(texts, str) else [normalize_newlines(text) for text in texts]
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False, **options)

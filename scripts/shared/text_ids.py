"""From text to ids, the same for training, reading, asking and drawing."""

import io
from codecs import getincrementaldecoder

from transformers import BatchEncoding, PreTrainedTokenizerBase


def normalize_newlines(text: str) -> str:
    r"""The text with \n at the end of every line, as Python's text mode reads it: \r\n and \r are other names of it."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def newline_decoder() -> io.IncrementalNewlineDecoder:
    """Decodes UTF-8 given in any pieces to what `normalize_newlines` makes of the whole.

    Its `decode(data, final)` raises UnicodeDecodeError.
    """
    return io.IncrementalNewlineDecoder(getincrementaldecoder("utf-8")(), translate=True)


def encode(tokenizer: PreTrainedTokenizerBase, texts: str | list[str], **options) -> BatchEncoding:
    """What the tokenizer makes of a text, or of each of several: nothing is added, and what looks like a special token
    ("</s>") is text. `options` are the tokenizer's; the offsets that it returns are those of `normalize_newlines`.
    """
    texts = normalize_newlines(texts) if isinstance(texts, str) else [normalize_newlines(text) for text in texts]
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False, **options)

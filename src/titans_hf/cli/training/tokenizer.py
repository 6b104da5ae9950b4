"""The tokenizer of a run: a saved one, or one token per byte."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from titans_hf.cli.shared import checkpoints

FIRST_BYTE = 3  # the token of byte 0, after <pad>, </s> and <unk>


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with the vocabulary of ByT5Tokenizer, which itself appends </s> to every prompt."""
    letters = bytes_to_unicode()
    tokens = ["<pad>", "</s>", "<unk>", *(letters[byte] for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def is_byte_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns True for `byte_tokenizer()`, new or loaded from a file: byte b of UTF-8 is token 3 + b."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # None for a tokenizer in Python
    return backend is not None and backend.to_str() == byte_tokenizer().backend_tokenizer.to_str()


def load_tokenizer(name: str, argument: str = "--tokenizer") -> PreTrainedTokenizerBase:
    """Loads a tokenizer by its folder or Hub name; `bytes` is `byte_tokenizer()`. Raises ValueError if that fails."""
    tokenizer = byte_tokenizer() if name == "bytes" else checkpoints.load_tokenizer(name, argument)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{argument} {name} has no eos token, which has to separate the documents")
    return tokenizer

"""Reads any amount of text into a memory, for titans-hf ask to answer from.

    titans-hf read MODEL TEXT... --memory DIR

TEXT is a file, a folder or - for standard input. In a folder and its subfolders the .txt and .md files are read, sorted
by path. A README.md is read only if there is no other file. The memory is saved every --save_every tokens. After an
interruption, the same command checks that the texts are the same and resumes from the last save; further texts may be
given at the end. With --append, TEXT is read after all texts that the memory has read. A repeated --append goes on
where the first was interrupted, and reads nothing if it was complete. A memory contains the texts that it has read:
treat it like the texts themselves.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from titans_hf import TitansCache
from titans_hf.cache_files import DESCRIPTION
from titans_hf.cli.shared import checkpoints
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.devices import choose_device
from titans_hf.cli.shared.text_files import describe_files, find_files
from titans_hf.cli.shared.text_ids import encode, newline_decoder

BLOCK = 1 << 14  # bytes of text that are tokenized at once
START = 1 << 16  # tokens: a record has a digest of the first ones, so that another text is recognised early


def load_model(path: str, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a Titans checkpoint and its tokenizer. Raises ValueError if `path` is not one."""
    config = checkpoints.load_config(path, "MODEL")
    if config.model_type != "titans":
        raise ValueError(f"MODEL {path} is a {config.model_type} model, which has no memory")
    device, tokenizer = choose_device(device), checkpoints.load_tokenizer(path, "MODEL")
    return checkpoints.load_model(path, "MODEL").to(device).eval(), tokenizer


def list_texts(texts: list[str]) -> list[Path | None]:
    """Lists the files of all arguments, None for standard input; prints which files of a folder are left out. Raises
    ValueError for a path without files.
    """
    files = []
    for text in texts:
        found = [None] if text == "-" else find_files(text, "TEXT")
        if text != "-" and (description := describe_files(text, found)):
            print(description, file=sys.stderr)
        files += found
    return files


def text_decoder(file: Path | None) -> Callable[..., str]:
    """Returns a function that decodes the next bytes of a file; it raises ValueError, naming the file, for bytes that
    are not UTF-8, and with `final` for half a letter at the end.
    """
    decoder = newline_decoder()

    def decode(data: bytes, final: bool = False) -> str:
        try:
            return decoder.decode(data, final=final)
        except UnicodeDecodeError as error:
            raise ValueError(f"TEXT {file or '-'} is not UTF-8: {error}") from error

    return decode


def blocks(files: list[Path | None]) -> Iterator[tuple[str, int]]:
    """Yields the texts in order, in blocks that start before a word, each with its number of bytes in the file.

    Raises ValueError, naming the file, for a text that is not UTF-8.
    """
    for number, file in enumerate(files):
        decode, rest = text_decoder(file), "\n" if number else ""
        with sys.stdin.buffer if file is None else file.open("rb") as stream:
            while data := stream.read(BLOCK):
                rest += decode(data)
                cut = max(rest.rfind(" "), rest.rfind("\n"))
                cut = cut if cut > 0 else len(rest)
                yield rest[:cut], len(data)
                rest = rest[cut:]
            yield rest + decode(b"", final=True), 0


class TokenStream:
    """Tokenizes the texts in order. `num_bytes`: number of bytes read from the files so far."""

    def __init__(self, files: list[Path | None], tokenizer: PreTrainedTokenizerBase):
        self.blocks, self.tokenizer = blocks(files), tokenizer
        self.pending, self.num_bytes = np.empty(0, np.int64), 0

    def next_tokens(self, number: int) -> np.ndarray:
        """Returns the next `number` tokens; fewer at the end of the texts."""
        while len(self.pending) < number and (block := next(self.blocks, None)) is not None:
            text, length = block
            tokens = encode(self.tokenizer, text).input_ids
            self.pending = np.concatenate([self.pending, np.array(tokens, np.int64)])
            self.num_bytes += length
        tokens, self.pending = self.pending[:number], self.pending[number:]
        return tokens

    def put_back(self, pieces: list[np.ndarray]) -> None:
        """Puts back tokens that `next_tokens` has returned: it returns them again."""
        self.pending = np.concatenate([*pieces, self.pending])


class TokenDigest:
    """Number of tokens and their digest, to recognise a text."""

    def __init__(self):
        self.num_tokens, self._start, self._all = 0, hashlib.sha256(), hashlib.sha256()

    def update(self, tokens: np.ndarray) -> None:
        tokens = tokens.astype("<i8")
        self._start.update(tokens[: max(0, START - self.num_tokens)].tobytes())
        self._all.update(tokens.tobytes())
        self.num_tokens += len(tokens)

    def record(self) -> dict[str, Any]:
        """Returns tokens: their number, sha256: of all, start: sha256 of the first START."""
        return {"tokens": self.num_tokens, "sha256": self._all.hexdigest(), "start": self._start.hexdigest()}


class Reading:
    """Reads texts into the memory of a folder, `piece` tokens at a time.

    finished: True once all texts have been read.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, stream: TokenStream, piece: int):
        self.model, self.folder, self.stream, self.piece = model, folder, stream, piece
        self.cache, self.digest, self.finished = TitansCache(model.config), TokenDigest(), False

    @property
    def num_read(self) -> int:
        """Number of tokens of the texts that the memory has read."""
        return self.digest.num_tokens

    def resume(self, append: bool, abandon: bool = False) -> None:
        """Loads the memory of the folder, if it has one, and skips the tokens that it has read. With `append` it skips
        tokens only if TEXT is the text that the memory has read last.

        Raises ValueError if it has read other texts; with `append` only if these were not read to their end, unless
        `abandon` is set.
        """
        if not (self.folder / DESCRIPTION).exists():
            return
        self.cache = TitansCache.from_pretrained(self.folder, self.model)
        before = read_before(self.cache.about)
        if append and (before is None or ((before["finished"] or abandon) and not self._repeats(before))):
            return
        hint = "give the texts that it has read, or --append to read on with others"
        if before is None:
            raise ValueError(f"--memory {self.folder} was not made by reading texts: {hint}")
        if append:
            hint = "give these again to read the rest, or --abandon to leave it unread"
        while len(tokens := self.stream.next_tokens(min(self.piece, before["tokens"] - self.num_read))):
            self._count(tokens)
        if self.digest.record()["sha256"] != before["sha256"]:
            stopped = " and was interrupted before their end" if append else ""
            raise ValueError(
                f"--memory {self.folder} has read {before['tokens']:,} tokens of other texts{stopped}: {hint}"
            )

    def _repeats(self, before: dict[str, Any]) -> bool:
        """Returns whether TEXT is the text that was read last. If that reading was interrupted, the read part must be
        the beginning of TEXT. Leaves the stream where it was.
        """
        digest, pieces = TokenDigest(), []
        while len(tokens := self.stream.next_tokens(min(self.piece, before["tokens"] - digest.num_tokens))):
            digest.update(tokens)
            pieces.append(tokens)
            if digest.num_tokens >= START and digest.record()["start"] != before.get("start"):
                break
        more = self.stream.next_tokens(1)
        self.stream.put_back([*pieces, more])
        return digest.record()["sha256"] == before["sha256"] and not (before["finished"] and len(more))

    def read(self) -> bool:
        """Reads the next tokens; returns False if there were none."""
        tokens = self.stream.next_tokens(self.piece)
        if len(tokens):
            ids = torch.tensor(tokens[None], device=self.model.device)
            with torch.inference_mode():
                self.model(ids, cache=self.cache, use_cache=True, logits_to_keep=1)
            self._count(tokens)
        self.finished = not len(tokens)
        return not self.finished

    def _count(self, tokens: np.ndarray) -> None:
        self.digest.update(tokens)

    def save(self) -> None:
        """Saves the memory, with a record of the texts that it has read."""
        self.cache.about["reading"] = self.digest.record() | {"finished": self.finished}
        self.cache.save_pretrained(self.folder, self.model)


def read_before(about: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the record of `Reading.save`: the number of tokens read of the last texts, their digest, and whether all
    were read. None for a memory without a record. Raises ValueError for a damaged record.
    """
    reading = about.get("reading")
    if reading is None:
        return None
    types = {"tokens": int, "sha256": str, "finished": bool}
    if not isinstance(reading, dict) or any(type(reading.get(name)) is not kind for name, kind in types.items()):
        raise ValueError(f"the memory's `about` is damaged: its reading is {reading!r:.80}")
    return reading


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a Titans checkpoint: a folder or a name on the Hub")
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="a file, a folder, or - for standard input")
    parser.add_argument("--memory", type=Path, required=True, help="the folder to save to, and to go on from")
    parser.add_argument(
        "--save_every",
        type=int,
        default=100_000,
        help="save after every so many tokens",
    )
    parser.add_argument("--piece", type=int, default=4096, help="tokens read at once: they bound the memory needed")
    parser.add_argument("--append", action="store_true", help="read TEXT after whatever the memory has read")
    parser.add_argument(
        "--abandon", action="store_true", help="with --append: leave texts unread that were not read to their end"
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU if there is one)")
    args = parser.parse_args(argv)
    check_minimums(args, save_every=1, piece=1)
    if args.abandon and not args.append:
        raise ValueError("--abandon needs --append")
    check_folder(args.memory, "--memory")
    return args


def main(argv: list[str] | None = None) -> Reading:
    args = parse(argv)
    files = list_texts(args.texts)
    model, tokenizer = load_model(args.model, args.device)
    stream = TokenStream(files, tokenizer)
    reading = Reading(model, args.memory, stream, min(args.piece, args.save_every))
    total = None if None in files else sum(file.stat().st_size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading") as bar:
        reading.resume(args.append, args.abandon)
        bar.update(stream.num_bytes)
        bar.set_postfix_str(f"{reading.num_read:,} tokens")
        skipped = kept = reading.num_read
        while reading.read():
            bar.update(stream.num_bytes - bar.n)
            bar.set_postfix_str(f"{reading.num_read:,} tokens")
            if reading.num_read + reading.piece > kept + args.save_every:
                reading.save()
                kept = reading.num_read
        if not reading.num_read:
            raise ValueError(f"TEXT {' '.join(args.texts)} holds no text")
        reading.save()
    if 0 < skipped == reading.num_read:
        print("All of TEXT had been read already. To read it again, give it twice, without --append.", file=sys.stderr)
    return reading


if __name__ == "__main__":
    run_command(main)

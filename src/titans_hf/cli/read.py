"""Reads any amount of text into a memory, for titans-hf ask to answer from.

    titans-hf read MODEL TEXT... --memory DIR

TEXT is a file, a folder or - for standard input. In a folder and its subfolders the files with one of --suffixes are
read, sorted by path. A README.md is read only if there is no other file. All texts are tokenized as one text, with a
line end between two of them. The memory is saved every --save_seconds. After an interruption, the same command checks
that the texts are the same and resumes from the last save; further texts may be given at the end. With --append, TEXT
is read after all texts that the memory has read. A repeated --append continues an interrupted one, and reads nothing if
the first was complete. A memory contains the texts that it has read: treat it like the texts themselves.
"""

import argparse
import hashlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from titans_hf.cache_files import DESCRIPTION
from titans_hf.cli.shared.argument_checks import add_model_options, check_folder, check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.memories import AnyCache, fingerprint_for_memories, load_cache, load_with_memory, new_cache
from titans_hf.cli.shared.text_files import TEXT_SUFFIXES, describe_files, find_files
from titans_hf.cli.shared.text_ids import encode_in_windows

BLOCK = 1 << 14  # letters of a text that are read at once


def list_texts(texts: list[str], suffixes: list[str]) -> list[Path | None]:
    """Lists the files of all arguments, None for standard input; prints which files of a folder are left out. Raises
    ValueError for a path without files.
    """
    files = []
    for text in texts:
        found = [None] if text == "-" else find_files(text, "TEXT", suffixes)
        if text != "-" and (description := describe_files(text, found, "--suffixes")):
            print(description, file=sys.stderr)
        files += found
    return files


class TokenStream:
    """Tokenizes the texts in order, as one text with a line end between two of them.

    num_bytes: number of bytes of the texts so far, without byte order marks and with a byte for a line end.
    """

    def __init__(self, files: list[Path | None], tokenizer: PreTrainedTokenizerBase):
        self.num_bytes = 0
        self.ids, self.pending = encode_in_windows(tokenizer, self._pieces(files)), np.empty(0, np.int32)

    def _pieces(self, files: list[Path | None]) -> Iterator[str]:
        """Yields the texts in pieces. Raises ValueError, naming the file, for a text that is not UTF-8."""
        for number, file in enumerate(files):
            if number:
                yield "\n"
            data = sys.stdin.buffer if file is None else file.open("rb")
            with io.TextIOWrapper(data, encoding="utf-8-sig") as stream:
                try:
                    while text := stream.read(BLOCK):
                        self.num_bytes += len(text.encode())
                        yield text
                except UnicodeDecodeError as error:
                    raise ValueError(f"TEXT {file or '-'} is not UTF-8: {error}") from error

    def next_tokens(self, number: int) -> np.ndarray:
        """Returns the next `number` tokens; fewer at the end of the texts."""
        found = [self.pending]
        while sum(map(len, found)) < number and (ids := next(self.ids, None)) is not None:
            found.append(np.array(ids, np.int32))
        joined = np.concatenate(found)
        self.pending = joined[number:]
        return joined[:number]

    def put_back(self, tokens: np.ndarray) -> None:
        """Puts back tokens that `next_tokens` has returned: it returns them again."""
        self.pending = np.concatenate([tokens, self.pending])


class Reading:
    """Reads texts into the memory of a folder, `piece` tokens at a time.

    num_read: number of tokens of the texts that the memory has read. finished: True once all texts have been read.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, stream: TokenStream, piece: int):
        self.model, self.folder, self.stream, self.piece = model, folder, stream, piece
        self.fingerprint = fingerprint_for_memories(model)  # hashes all weights of a Titans: once, not at every save
        self.num_read, self.finished, self.digest = 0, False, hashlib.sha256()
        self.cache = new_cache(model)
        self.cache.seen_in_folders[folder.resolve()] = None  # a memory of another process is not replaced

    def resume(self, append: bool) -> None:
        """Loads the memory of the folder, if it has one, and skips the tokens that it has read. With `append` it skips
        tokens only if TEXT is the text that the memory has read last, or begins with the part that the memory has read.

        Raises ValueError if it has read other texts, unless `append` is set.
        """
        if not (self.folder / DESCRIPTION).exists():
            return
        self.cache = load_cache(self.folder, self.model, self.fingerprint)
        before = read_before(self.cache.about)
        if before is None:
            if append:
                return
            raise ValueError(f"--memory {self.folder} was not made by reading texts: give --append to read on")
        tokens = self.stream.next_tokens(before["tokens"])
        more = self.stream.next_tokens(1)
        self.stream.put_back(more)
        same = hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest() == before["sha256"]
        if same and not (append and before["finished"] and len(more)):
            self._count(tokens)
        elif append:
            self.stream.put_back(tokens)
        else:
            raise ValueError(
                f"--memory {self.folder} has read {before['tokens']:,} tokens of other texts: give the texts that it "
                "has read, or --append to read other texts after them"
            )

    def read(self) -> bool:
        """Reads the next tokens; returns False if there were none."""
        tokens = self.stream.next_tokens(self.piece)
        if len(tokens):
            ids = torch.tensor(tokens[None], dtype=torch.int64, device=self.model.device)
            with torch.inference_mode():
                self.model(ids, cache=self.cache, use_cache=True, logits_to_keep=1).logits.cpu()  # waits for a GPU
            self._count(tokens)
        self.finished = not len(tokens)
        return not self.finished

    def _count(self, tokens: np.ndarray) -> None:
        self.digest.update(tokens.astype("<i4").tobytes())
        self.num_read += len(tokens)

    def save(self) -> None:
        """Saves the memory, with a record of the texts that it has read."""
        record = {"tokens": self.num_read, "sha256": self.digest.hexdigest(), "finished": self.finished}
        self.cache.about["reading"] = record
        self.cache.save_pretrained(self.folder, self.model, model_fingerprint=self.fingerprint)


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


def num_listed(cache: AnyCache) -> int | None:
    """Returns how many of the last tokens a full list of surprising tokens covers; None for a list that is not full,
    and for a model without a list.
    """
    if (positions := getattr(cache, "state", {}).get("list.positions")) is None or positions[0, 0] < 0:
        return None
    return int(cache.seen[0] - positions[0, 0])


def size_of(files: list[Path | None]) -> int | None:
    """Returns the bytes of all files; None if one is standard input or another pipe."""
    return sum(file.stat().st_size for file in files) if all(file and file.is_file() for file in files) else None


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add_model_options(parser)
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="a file, a folder, or - for standard input")
    parser.add_argument("--memory", type=Path, required=True, help="the folder to save to, and to resume from")
    parser.add_argument("--suffixes", nargs="+", default=TEXT_SUFFIXES, help="endings of a folder's files to read")
    parser.add_argument("--save_seconds", type=float, default=60, help="seconds between two saves")
    parser.add_argument("--piece", type=int, default=4096, help="tokens read at once; fewer need less working memory")
    parser.add_argument("--append", action="store_true", help="read TEXT after all texts that the memory has read")
    args = parser.parse_args(argv)
    check_minimums(args, save_seconds=0, piece=1)
    check_folder(args.memory, "--memory")
    return args


def main(argv: list[str] | None = None) -> Reading:
    args = parse(argv)
    files = list_texts(args.texts, args.suffixes)
    model, tokenizer = load_with_memory(args)
    stream = TokenStream(files, tokenizer)
    reading = Reading(model, args.memory, stream, args.piece)
    reading.resume(args.append)
    before = f"; {reading.num_read:,} tokens have been read before" if reading.num_read else ""
    print(f"reading {len(files):,} text{'s'[: len(files) > 1]}{before}", file=sys.stderr)
    skipped, saved_at, warned = reading.num_read, time.monotonic(), False
    with tqdm(total=size_of(files), unit="B", unit_scale=True, desc="reading") as bar:
        while reading.read():
            bar.update(stream.num_bytes - bar.n)
            bar.set_postfix_str(f"{reading.num_read:,} tokens")
            if not warned and (listed := num_listed(reading.cache)) is not None:
                warned = True
                tqdm.write(
                    f"The memory's list of tokens is full: it now holds the last {listed:,} tokens or so, and will "
                    "forget the tokens before them.",
                    file=sys.stderr,
                )
            if time.monotonic() - saved_at >= args.save_seconds:
                reading.save()
                saved_at = time.monotonic()
    if not reading.num_read:
        raise ValueError(f"TEXT {' '.join(args.texts)} holds no text")
    reading.save()
    if 0 < skipped == reading.num_read:
        print("All of TEXT had been read already. To read it again, give it twice, without --append.", file=sys.stderr)
    return reading


if __name__ == "__main__":
    run_command(main)

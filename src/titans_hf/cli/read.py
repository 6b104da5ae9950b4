"""Reads any amount of text into a memory, for titans-hf ask to answer from."""

import hashlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from titans_hf.cache_files import DESCRIPTION
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.memories import fingerprint_for_memories, load_cache, load_with_memory, new_cache
from titans_hf.cli.shared.text_files import find_files, read_text
from titans_hf.cli.shared.text_ids import encode
from titans_hf_console import parse


class Reading:
    """Reads texts into the memory of a folder.

    digests: SHA-256 of each text that was begun. num_read: number of tokens read of the last one.
    """

    def __init__(self, model: PreTrainedModel, folder: Path):
        self.model, self.folder = model, folder
        self.fingerprint = fingerprint_for_memories(model)  # hashes all weights of a Titans: once, not at every save
        self.digests: list[str] = []
        self.num_read = 0
        self.cache = new_cache(model)
        self.cache.seen_in_folders[folder.resolve()] = None  # a memory of another process is not replaced

    def resume(self, texts: list[str], append: bool) -> None:
        """Loads the memory of the folder, if it has one. If the texts begin with the texts of its last reading, this
        reading goes on there.

        Raises ValueError if the memory has read other texts, unless `append` is set.
        """
        if not (self.folder / DESCRIPTION).exists():
            return
        self.cache = load_cache(self.folder, self.model, self.fingerprint)
        digests, num_read = read_before(self.cache.about)
        if digests and digests == [digest_of(text) for text in texts[: len(digests)]]:
            self.digests, self.num_read = digests, num_read
        elif not append:
            made = f"has read {len(digests):,} other texts" if digests else "was not made by reading texts"
            raise ValueError(
                f"--memory {self.folder} {made}: give the texts that it has read, or --append to read TEXT after them"
            )

    def pieces(self, texts: list[str], tokenize: Any, size: int) -> Iterator[tuple[Tensor, float]]:
        """Yields the ids (T,) of at most `size` tokens that were not read yet, and how many letters they are."""
        for number, text in enumerate(texts):
            if number < len(self.digests) - 1:
                continue
            if number == len(self.digests):
                self.digests, self.num_read = [*self.digests, digest_of(text)], 0
            ids = torch.tensor(tokenize("\n" * (number > 0) + text), dtype=torch.int64)
            while len(piece := ids[self.num_read : self.num_read + size]):  # `read` counts its tokens
                yield piece, len(text) * len(piece) / len(ids)

    def read(self, ids: Tensor) -> None:
        """Reads ids (T,) of the last text into the memory."""
        with torch.inference_mode():
            ids = ids[None].to(self.model.device)
            self.model(ids, cache=self.cache, use_cache=True, logits_to_keep=1).logits.cpu()  # waits for a GPU
        self.num_read += ids.shape[1]

    def save(self) -> None:
        """Saves the memory, with a record of the texts that it has read."""
        self.cache.about["reading"] = {"texts": self.digests, "tokens": self.num_read}
        self.cache.save_pretrained(self.folder, self.model, model_fingerprint=self.fingerprint)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_before(about: dict[str, Any]) -> tuple[list[str], int]:
    """Returns the record of `Reading.save`: the digests of the last texts, and the tokens read of the last of them. A
    memory without a record has read no text. Raises ValueError for a damaged record.
    """
    reading = about.get("reading")
    match {"texts": [], "tokens": 0} if reading is None else reading:
        case {"texts": [*digests], "tokens": int(num_read)}:
            return [str(x) for x in digests], num_read
    raise ValueError(f"the memory's `about` is damaged: its reading is {reading!r:.80}")


def main(argv: list[str] | None = None) -> Reading:
    args = parse("read", argv)
    check_minimums(args, save_seconds=0, piece=1)
    check_folder(args.memory, "--memory")
    files = [[Path(x)] if x == "-" else find_files(x, "TEXT", args.suffixes) for x in args.texts]
    texts = [read_text(file, "TEXT") for found in files for file in found]
    if not any(texts):
        raise ValueError(f"TEXT {' '.join(args.texts)} holds no text")
    model, tokenizer = load_with_memory(args)
    reading = Reading(model, args.memory)
    reading.resume(texts, args.append)
    print(f"reading {len(texts):,} text{'s'[: len(texts) > 1]}", file=sys.stderr)
    num_tokens, saved_at = 0, time.monotonic()
    with tqdm(total=sum(map(len, texts)), unit=" letters", unit_scale=True, desc="reading") as bar:
        for piece, letters in reading.pieces(texts, lambda text: encode(tokenizer, text).input_ids, args.piece):
            reading.read(piece)
            num_tokens += len(piece)
            bar.update(min(letters, bar.total - bar.n))  # sums of shares may be above the total
            bar.set_postfix_str(f"{num_tokens:,} tokens")
            if time.monotonic() - saved_at >= args.save_seconds:
                reading.save()
                saved_at = time.monotonic()
    reading.save()
    if not num_tokens:
        print("All of TEXT had been read already. To read it again, give it twice, without --append.", file=sys.stderr)
    return reading


if __name__ == "__main__":
    run_command(main)

"""Makes the blocks of a training run from so many megabytes of text, and prints what memory that took, as JSON.

python tests/helpers/tokenizing_worker.py MEGABYTES FOLDER
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from titans_hf.cli.training.arguments import RunArguments
from titans_hf.cli.training.data import load_blocks
from titans_hf.cli.training.tokenizer import load_tokenizer

MEGABYTE = 1 << 20
SENTENCE = "Es war einmal ein König, der hatte zwölf Töchter, eine immer schöner als die andere. "


def write_texts(folder: Path, megabytes: int) -> None:
    """Writes files of a megabyte, as long as a novel, all different."""
    folder.mkdir()
    for number in range(megabytes):
        text = f"Band {number}. {SENTENCE * (MEGABYTE // len(SENTENCE))}"
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")


def held_megabytes(process: int | str) -> int:
    """Returns the resident memory of a process without pages of files, which the kernel takes back when it needs them;
    0 for a process that has ended.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = [int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")]
    return found[0] // 1024 if found else 0


class Peak(threading.Thread):
    """Records in `megabytes` the largest `held_megabytes` of this process or of one that it has started."""

    megabytes = 0

    def run(self) -> None:
        own = os.getpid()
        while True:
            children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
            self.megabytes = max(self.megabytes, *map(held_megabytes, [own, *children]))
            time.sleep(0.005)


def main(megabytes: str, folder: str) -> None:
    if not Path(folder).exists():
        write_texts(Path(folder), int(megabytes))
    tokenizer, peak = load_tokenizer("bytes"), Peak(daemon=True)
    peak.start()
    blocks = load_blocks(RunArguments(train_data=folder, block_length=1024), tokenizer)
    print(json.dumps({"blocks": len(blocks.train) + len(blocks.evaluation), "peak": peak.megabytes}))


if __name__ == "__main__":
    main(*sys.argv[1:])

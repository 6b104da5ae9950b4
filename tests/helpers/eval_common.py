"""Texts and a small data folder in the published formats, for the tests of eval/ and of the pages."""

import json
from pathlib import Path

BOOK = "It was dark. Mr. Darcy came! 'Who is there?' she said. Nobody was. The wind (it blew.) fell.\n" * 400
STORIES = {
    "qa1_single-supporting-fact": "1 Mary went to the hall.\n2 John ran to the garden.\n3 Where is Mary? \thall\t1\n"
    "4 Mary left for the office.\n5 Where is Mary? \toffice\t4\n1 Sandra moved to the garden.\n"
    "2 Where is Sandra? \tgarden\t1\n"
}


def make_data(folder: Path) -> Path:
    """Writes a data folder with a book, stories of bAbI and two texts of LAMBADA; returns it."""
    for name in ("lambada", "babi/en-10k", "books/test"):
        (folder / name).mkdir(parents=True)
    texts = [{"text": "He saw a dog"}, {"text": 'one two "three" four'}]
    (folder / "lambada/lambada_test.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    (folder / "books/test/a.txt").write_text(BOOK)
    for name, text in STORIES.items():
        (folder / f"babi/en-10k/{name}_test.txt").write_text(text)
    return folder

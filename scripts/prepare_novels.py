"""Copies the novels of docs/results.md out of clones of two public repositories, and checks every file's SHA-256.

    git clone https://github.com/computationalstylistics/100_english_novels
    git clone https://github.com/computationalstylistics/A_Small_Collection_of_British_Fiction
    python -m scripts.prepare_novels 100_english_novels A_Small_Collection_of_British_Fiction --output data/books

Makes data/books/train (83 novels), valid (4) and test (6, by other authors than the training novels'). Which file goes
where, its checksum and the commit it was taken from are in novels.json beside this script.
"""

import argparse
import hashlib
import json
from pathlib import Path

from titans_hf.cli.shared.command_line import HelpFormatter, run_command

NOVELS = Path(__file__).with_name("novels.json")


def find_sources(clones: list[Path], collections: list[dict]) -> dict[Path, tuple[str, str]]:
    """Finds every novel of `collections`: {file in a clone: (path below the output, sha256)}.

    Raises ValueError, naming the repository and the commit, where no clone holds all of a collection's files.
    """
    sources = {}
    for collection in collections:
        files = [
            (path, split, digest) for split, paths in collection["files"].items() for path, digest in paths.items()
        ]
        clone = next((clone for clone in clones if all((clone / path).is_file() for path, _, _ in files)), None)
        if clone is None:
            raise ValueError(
                f"no given folder is a clone of {collection['repository']} with all of its "
                f"{len(files)} novels; they are there at commit {collection['commit']}"
            )
        sources |= {clone / path: (f"{split}/{Path(path).name}", digest) for path, split, digest in files}
    return sources


def copy_novels(sources: dict[Path, tuple[str, str]], output: Path) -> None:
    """Writes the files below `output`, in place of existing files. All novels are checked before a file is written.

    Raises ValueError for a file whose SHA-256 is another one.
    """
    contents = {}
    for source, (name, digest) in sources.items():
        content = source.read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != digest:
            raise ValueError(
                f"{source} has SHA-256 {found}, not {digest}: check out the commit that {NOVELS.name} names"
            )
        contents[output / name] = content
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("clones", metavar="CLONE", type=Path, nargs="+", help="folders of the cloned repositories")
    parser.add_argument("--output", type=Path, required=True, help="folder for train, valid and test")
    args = parser.parse_args(argv)
    sources = find_sources(args.clones, json.loads(NOVELS.read_text(encoding="utf-8")))
    copy_novels(sources, args.output)
    print(f"{len(sources)} novels are in {args.output}, each with the SHA-256 of {NOVELS.name}")


if __name__ == "__main__":
    run_command(main)

"""What a frozen model remembers: facts, needles and chats by each way to read beyond a window.

    python -m eval.streaming MODEL --task facts --methods window full passages --text data/books/test \\
        --output runs/streaming.jsonl
    python -m eval.streaming --output runs/streaming.jsonl   # the tables

Every text is read in pieces, as a stream. With --task

    facts      20 are told, a text is read, 20 questions   ruler      needles, of --kinds
    chat       12 conversations: new answers, and the      babilong   qa1 to qa3 of --stories, in the first --text
               log probability of given ones               told       a chat that tells 20 facts, reads a text, and
                                                                      asks for each in a branch

Methods:

    full         attention to all tokens                   window      --window tokens and a sink
    passages     titans_hf.remember                        search      the token after the longest match
    retrieved    plain retrieval: the passages that `remember` would choose, and the question alone
    bm25         plain retrieval: the best --sentences by BM25, and the question alone
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.common.records import append_record, describe_commit, read_records
from eval.streaming import readers, ruler
from eval.streaming.tables import tables
from eval.streaming.tasks import LENGTHS, digest, make_tasks, perform
from titans_hf import Passages
from titans_hf.cli.shared.command_line import run_command

BENCHMARK = "streaming"
METHODS = {
    "full": lambda model, *_: readers.Reader(model),
    "window": lambda model, _, args: readers.Remember(model, args.window, None),
    "passages": lambda model, _, args: readers.Remember(model, args.window, Passages()),
    "search": lambda model, _, args: readers.Search(model, args.window),
    "retrieved": lambda model, tokenizer, _: readers.RetrievedPassages(model, tokenizer),
    "bm25": lambda model, tokenizer, args: readers.RetrievedSentences(model, tokenizer, args.sentences),
}


def run(args: argparse.Namespace) -> None:
    """Reads all texts with all methods that the output does not have yet."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tasks = make_tasks(args, tokenizer)
    for name in args.methods:
        method = name + (f", {args.label}" if args.label else "")
        about = {"task": args.task, "data": args.data, "window": args.window, "seed": args.seed}
        done = [x["run"] for x in read_records(args.output, BENCHMARK)]
        left = [x for x in tasks if about | {"text": x.text, "method": method} not in done]
        if left:
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
            reader = METHODS[name](model, tokenizer, args)
        for task in left:
            begin = time.process_time()
            result, state_bytes, tokens = perform(task, reader, tokenizer)
            seconds = round(time.process_time() - begin, 1)
            config = reader.settings | {"model": Path(args.model).name}
            line = {"run": about | {"text": task.text, "method": method}, "config": config, "tokens": tokens}
            line["digest"] = digest(task)
            line |= {"bytes": state_bytes, "seconds": seconds, "commit": describe_commit(), "result": result}
            append_record({"benchmark": BENCHMARK, **line}, args.output)
            print(f"{method}, {task.text}: {seconds:.0f} s of a processor", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder or a name on the Hub; without: the tables")
    parser.add_argument("--methods", nargs="+", default=["window", "full"], choices=METHODS, metavar="METHOD")
    parser.add_argument("--task", choices=["facts", "ruler", "babilong", "chat", "told"], default="facts")
    parser.add_argument("--kinds", nargs="+", choices=ruler.KINDS, default=list(ruler.KINDS), metavar="KIND")
    parser.add_argument("--number", type=int, default=12, help="prompts or stories of a kind, told chats")
    parser.add_argument("--stories", type=Path, help="the folder of bAbI's files, with --task babilong")
    parser.add_argument("--data", default="texts", help="the name of the texts in the record")
    parser.add_argument("--text", type=Path, nargs="+", help="files or folders; a .raw file is cut into its articles")
    parser.add_argument("--place", type=float, default=0.1, help="where in a text its first token is: a share")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"tokens of fillers or prompts: {LENGTHS}")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the frozen weights")
    parser.add_argument("--sentences", type=int, default=3, help="that `bm25` reads")
    parser.add_argument("--label", help="added to the methods' names in the record")
    parser.add_argument("--seed", type=int, default=0, help="of facts and needles")
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, to which lines are added")
    args = parser.parse_args(argv)
    if args.model:
        needed = ("text", "stories")[: 1 + (args.task == "babilong")]
        if missing := [f"--{name}" for name in needed if not getattr(args, name)]:
            raise ValueError(f"MODEL with --task {args.task} needs {' and '.join(missing)}")
        args.lengths = LENGTHS.get(args.task, []) if args.lengths is None else args.lengths
        run(args)
        return
    print("\n\n".join(tables(read_records(args.output, BENCHMARK))))


if __name__ == "__main__":
    run_command(main)

"""Streaming memory per byte: what a frozen model gains by each way to remember what has left its window.

    python -m eval.streaming MODEL --methods full window window+match --data novels --text data/books/test \\
        --choice_text data/books/valid --output eval/results/streaming.jsonl
    python -m eval.streaming --output eval/results/streaming.jsonl --plot docs/streaming.png   # the tables

A method is a reader, with memories behind it: "window+neural". Every text is read in pieces, as a stream. Shares and
sharpness of memories behind a reader are chosen on the choice texts. With --task

    loss       each --text is scored token by token       ruler      niah_single_1 to 3, vt, cwe and fwe
    facts      20 are told, a text is read, 20 questions   babilong   qa1 to qa3 of --stories, in the first --text
    conversation   a user's eight sessions of chat, 25 questions with four options

Readers and memories:

    full       attention to all tokens            window     --window tokens and a sink
    longer     a window longer by --bytes         streaming  the text's first token as sink, in its place
    recent, random, tova, keydiff, snapkv         --bytes of tokens that have left the window, of --bits, by that score
    sgd, rms   dynamic evaluation, plain and as Krause et al.     bm25       blocks of the text put into the window
    fast, list, both, start                       titans_hf.remember; start: B_0, without learning
    +match, +neural, +knn, +knn-4mb               the longest match, a neural cache, kNN-LM of all tokens or the last
    +search    the longest match alone, its share not fitted

"full-" before a reader of `remember` keeps full attention.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.common.records import append_record, describe_commit, read_records
from eval.streaming import readers
from eval.streaming.mixtures import MIXTURES
from eval.streaming.reading import choose_links, load_texts, prepare
from eval.streaming.tables import plot, tables
from eval.streaming.tasks import LENGTHS, is_hopeless, make_tasks, perform
from titans_hf.cli.shared.command_line import run_command

BENCHMARK = "streaming"
SCORES = ("recent", "random", "tova", "keydiff", "snapkv")
BUDGETED = ("longer", *SCORES)
REMEMBER = {
    "fast": {"memory": ("fast_weights",)},
    "list": {"memory": ("list",)},
    "both": {"memory": ("fast_weights", "list")},
    "start": {"memory": ("fast_weights",), "learning": False},
}
READERS = ("full", "window", "streaming", "sgd", "rms", "bm25", *BUDGETED, *REMEMBER, *(f"full-{x}" for x in REMEMBER))


def make_reader(name: str, budget: float | None, args: argparse.Namespace) -> readers.Reader:
    """Loads the model anew, and makes a reader of it."""
    dtype = torch.float32 if name in ("sgd", "rms") else getattr(torch, args.dtype)  # steps need the digits
    model, window = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval(), args.window
    if name.removeprefix("full-") in REMEMBER:
        options = REMEMBER[name.removeprefix("full-")] | ({"adapter": args.adapter} if args.adapter else {})
        return readers.Remember(model, None if name.startswith("full-") else window, **options)
    if name in SCORES:
        return readers.Attention(model, window, budget=budget, score=name, bits=args.bits)
    make = {
        "longer": lambda: readers.Attention(model, window + round(budget / readers.Reader(model, 0).column_bytes)),
        "full": lambda: readers.Attention(model),
        "window": lambda: readers.Attention(model, window),
        "streaming": lambda: readers.Attention(model, window, near=False),
        "sgd": lambda: readers.Steps(model, window, rate=args.rate or 5e-3),
        "rms": lambda: readers.Steps(model, window, rate=args.rate or 1e-5, decay=args.decay),
        "bm25": lambda: readers.Retrieval(model, window),
    }
    return make[name]()


def run(args: argparse.Namespace) -> None:
    """Reads all texts with all methods that the output does not have yet."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tasks = make_tasks(args, tokenizer)
    choice = list(load_texts(args.choice_text, tokenizer, args.choice_tokens, 0.2).values())
    done = {tuple(x["run"].values()) for x in read_records(args.output, BENCHMARK)}
    by_reader = defaultdict(list)
    for method in args.methods:
        reader, *memories = method.split("+")
        for budget in args.bytes if reader in BUDGETED else [None]:
            by_reader[reader, budget].append(memories)
    for (name, budget), lists in by_reader.items():
        label = name if budget is None else f"{name} {budget / 1e6:g} MB"
        label += f" {args.bits} bits" if name in SCORES and args.bits < 16 else ""
        chains = {"+".join([label, *x]): x for x in lists}
        about = {"task": args.task, "data": args.data, "window": args.window, "seed": args.seed}
        left = [x for x in tasks if any((*about.values(), x.text, y) not in done for y in chains)]
        if not left:
            continue
        reader = make_reader(name, budget, args)
        read = prepare(reader, choice) if any(lists) or name == "rms" else []
        links = {chain: choose_links(read, memories) if memories else ([], []) for chain, memories in chains.items()}
        for task in left:
            if is_hopeless(task, read_records(args.output, BENCHMARK), about):
                print(f"{label}, {task.text}: full attention is at chance without a filler", flush=True)
                continue
            begin = time.process_time()
            found = perform(task, reader, {chain: x[0] for chain, x in links.items()}, tokenizer)
            seconds = round(time.process_time() - begin, 1)
            for chain, (result, state_bytes, tokens) in found.items():
                config = reader.settings | {"model": Path(args.model).name, "memories": links[chain][1]}
                line = {"run": about | {"text": task.text, "method": chain}, "config": config, "tokens": tokens}
                line |= {"bytes": state_bytes, "seconds": seconds, "commit": describe_commit(), "result": result}
                append_record({"benchmark": BENCHMARK, **line}, args.output)
            print(f"{label}, {task.text}: {seconds:.0f} s of a processor", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder or a name on the Hub; without: the tables")
    parser.add_argument("--methods", nargs="+", default=["window", "full"], metavar="READER[+MEMORY...]")
    parser.add_argument("--bytes", nargs="+", type=float, default=[5e5, 4e6, 18e6], help="of state beyond the window")
    parser.add_argument("--bits", type=int, choices=[2, 4, 8, 16], default=16, help="of a number beyond the window")
    parser.add_argument("--task", choices=["loss", "facts", "ruler", "babilong", "conversation"], default="loss")
    parser.add_argument("--number", type=int, help="questions of a kind of ruler (12) or babilong (60); users (12)")
    parser.add_argument("--stories", type=Path, help="the folder of bAbI's files, with --task babilong")
    parser.add_argument("--data", default="texts", help="the name of the texts in the record")
    parser.add_argument("--text", type=Path, nargs="+", help="files or folders; a .raw file is cut into its articles")
    parser.add_argument("--place", type=float, default=0.1, help="where in a text its first token is: a share")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a text with --task loss")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"tokens of fillers or prompts: {LENGTHS}")
    parser.add_argument("--choice_text", type=Path, help="texts that the shares of memories are chosen on")
    parser.add_argument("--choice_tokens", type=int, default=2048, help="tokens of each choice text")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the frozen weights")
    parser.add_argument("--adapter", type=Path, help="a fitted memory, for readers of titans_hf.remember")
    parser.add_argument("--rate", type=float, help="of sgd (5e-3) or rms (1e-5)")
    parser.add_argument("--decay", type=float, default=0.01, help="of rms: to the weights at the start")
    parser.add_argument("--seed", type=int, default=0, help="of the facts; with --task loss, of the adapter's fit")
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, to which lines are added")
    parser.add_argument("--plot", type=Path, help="a file for the picture of gain against bytes")
    args = parser.parse_args(argv)
    for method in args.methods:
        reader, *memories = method.split("+")
        if reader not in READERS or set(memories) - set(MIXTURES):
            raise ValueError(f"--methods has {method}: readers are {' '.join(READERS)}; memories {' '.join(MIXTURES)}")
    if args.model:
        needed = ("text", "choice_text", "stories")[: 3 if args.task == "babilong" else 2]
        if missing := [f"--{name}" for name in needed if not getattr(args, name)]:
            raise ValueError(f"MODEL with --task {args.task} needs {' and '.join(missing)}")
        args.lengths = LENGTHS.get(args.task, []) if args.lengths is None else args.lengths
        args.number = (60 if args.task == "babilong" else 12) if args.number is None else args.number
        run(args)
        return
    records = read_records(args.output, BENCHMARK)
    print("\n\n".join(tables(records)))
    if args.plot:
        plot(records, args.plot)


if __name__ == "__main__":
    run_command(main)

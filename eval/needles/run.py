"""Asks models for a pass-key, or for the answers of BABILong, at given lengths, and prints the accuracies.

    python -m eval.needles.run passkey MODEL --lengths 1024 16384 --output runs/passkey.jsonl
    python -m eval.needles.run qa1 MODEL --lengths 0 4096 --stories data/babi/en-10k --books data/books/test \
        --output runs/babilong.jsonl

A line of the output file has one model at one length. lm-eval's own tasks niah_single_1 and babilong_qa1, with
`titans-hf lm-eval`, ask the same of data from the Hub.
"""

import argparse
from itertools import islice
from pathlib import Path

from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerBase

from eval.common.records import append_record, describe_commit
from eval.needles import babilong, passkey
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.checkpoints import check_checkpoint, load_config, load_tokenizer
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.devices import choose_device
from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf.cli.titans_lm import TitansLM

TASKS = ("passkey", *(f"qa{i}" for i in range(1, 6)))
GENERATED = {"do_sample": False, "max_gen_toks": passkey.GENERATED_TOKENS, "until": []}
PASSKEY = {
    "task": "passkey",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{input}}",
    "doc_to_target": "{{target}}",
    "generation_kwargs": GENERATED,
    "process_results": lambda doc, results: {"acc": float(doc["target"] in results[0])},
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def make_task(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, length: int) -> ConfigurableTask:
    """Makes lm-eval's task of documents of one length. Raises ValueError for a length that no document fits into."""
    if args.task == "passkey":
        config, samples = PASSKEY, passkey.make_samples(tokenizer, length, args.limit)
    else:
        questions = babilong.read_questions(args.stories, args.task)
        samples = islice(babilong.make_samples(questions, args.books, tokenizer, length), args.limit)
        config = babilong.load_task_config(args.task)
    if not (rows := list(samples)):
        raise ValueError(f"--lengths {length} is too short for the facts of any question of {args.task}")
    data = {config["test_split"]: Dataset.from_list(rows)}
    return ConfigurableTask(config=config | {"custom_dataset": lambda **_: data})


def measure(lm: HFLM, task: ConfigurableTask, batch_size: int) -> dict[str, float]:
    """Returns the accuracy of a model in a task, its standard error and the number of documents."""
    found = simple_evaluate(
        lm,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        batch_size=batch_size,
        log_samples=False,
    )
    (scores,) = found["results"].values()
    error = scores["acc_stderr,none"]
    return {"acc": scores["acc,none"], "stderr": None if error == "N/A" else error, "documents": len(task.test_docs())}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("task", choices=TASKS, help="the pass-key, or a question of bAbI")
    parser.add_argument("models", metavar="MODEL", nargs="+", help="checkpoints with a tokenizer, Titans or others")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="tokens of a prompt, or of its context")
    parser.add_argument("--limit", type=int, default=500, help="documents of a length")
    parser.add_argument("--stories", type=Path, help="the folder of bAbI's files, as en-10k")
    parser.add_argument("--books", type=Path, help="a folder of texts that the facts of bAbI are hidden in")
    parser.add_argument("--batch_size", type=int, default=8, help="documents that a model reads at once")
    parser.add_argument("--device", help="cpu, cuda, ...; a GPU if there is one")
    parser.add_argument("--output", type=Path, required=True, help="a JSON Lines file, to which results are added")
    args = parser.parse_args(argv)
    check_minimums(args, lengths=0, limit=1, batch_size=1)
    if args.task != "passkey" and None in (args.stories, args.books):
        raise ValueError(f"{args.task} needs --stories and --books")
    rows = []
    for path in args.models:
        check_checkpoint(path, "MODEL")
        config, tokenizer = load_config(path, "MODEL"), load_tokenizer(path, "MODEL")
        tasks = {length: make_task(args, tokenizer, length) for length in args.lengths}
        kind = TitansLM if config.model_type in ("titans", "remember") else HFLM
        lm = kind(pretrained=path, batch_size=args.batch_size, device=str(choose_device(args.device)))
        facts = {"benchmark": args.task, "name": Path(path).resolve().name, "commit": describe_commit()}
        facts |= {"parameters": lm.model.num_parameters(), "config": config.to_diff_dict()}
        rows.append([facts["name"]])
        for length, task in tasks.items():
            result = measure(lm, task, args.batch_size)
            append_record(facts | {"length": length, "result": result}, args.output)
            rows[-1].append(f"{result['acc']:.3f} ({result['documents']})")
    print(markdown_table([f"{args.task}: accuracy (documents)", *map(str, args.lengths)], rows))


if __name__ == "__main__":
    run_command(main)

"""Classifies new DNA sequences by a model that eval.dna.run has saved, and writes a table of labels and probabilities.

    python -m eval.dna.run --train positive.fa negative.fa --test test.csv --save_models --output runs/mine
    python -m eval.dna.predict runs/mine/MODEL new.fa --output predicted.csv

The table has a row for each sequence: its name, the likeliest label, and the probability of each label.
"""

import argparse
from pathlib import Path

import pandas as pd
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, TextClassificationPipeline

import titans_hf  # noqa: F401  registers the model
from eval.dna.sequences import read_sequences
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.checkpoints import load_config, load_tokenizer, loading_weights
from titans_hf.cli.shared.command_line import HelpFormatter, run_command


def load_classifier(folder: Path) -> TextClassificationPipeline:
    """Loads a saved model and its tokenizer; raises ValueError for a model that does not classify."""
    config = load_config(folder, "MODEL")
    if not any("SequenceClassification" in name for name in config.architectures or []):
        raise ValueError(f"MODEL {folder} does not classify: it is of {config.architectures}")
    with loading_weights(folder, "MODEL"):
        model = AutoModelForSequenceClassification.from_pretrained(folder)
    return TextClassificationPipeline(model=model, tokenizer=load_tokenizer(folder, "MODEL"), top_k=None)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a folder of eval.dna.run, with --save_models")
    parser.add_argument("data", nargs="+", type=Path, metavar="FILE", help="FASTA, or a table with a column seq")
    parser.add_argument("--output", type=Path, required=True, metavar="TABLE.csv")
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args(argv)
    check_minimums(args, batch_size=1)
    check_folder(args.output.parent, "the folder of --output")
    sequences, classify = read_sequences(args.data, labelled=False), load_classifier(args.model)
    found = classify((text for text in sequences.texts), batch_size=args.batch_size)  # of a generator, one by one
    classes = list(classify.model.config.label2id)
    rows = [{x["label"]: x["score"] for x in scores} for scores in tqdm(found, total=len(sequences.texts), unit="seq")]
    table = pd.DataFrame(rows, columns=classes, index=pd.Index(sequences.names, name="name"))
    table.insert(0, "label", table.idxmax(axis=1), allow_duplicates=True)  # a class may be called "label"
    args.output.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(args.output, float_format="%.6f")
    counts = ", ".join(f"{number:,} {label}" for label, number in table.iloc[:, 0].value_counts().items())
    print(f"{args.output}: {counts}")


if __name__ == "__main__":
    run_command(main)

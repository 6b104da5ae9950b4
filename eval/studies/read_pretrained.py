"""Stores what a memory behind the last layer of a pretrained model needs to know of novels.

    titans-hf convert MODEL --output runs/windowed --window 256 --memory none
    python -m eval.studies.read_pretrained runs/windowed --books data/books --output runs/arrays

Of every token of the sets train, valid and test, folders of .txt files: y, the input of the last layer's feed-forward
network; the loss of the next token in nats; the entropy of the model's distribution of it.
"""

import argparse
import math
import random
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from titans_hf import TitansCache, TitansForCausalLM
from titans_hf.cli.shared.command_line import run_command

# of each set: where in a novel the text begins, its tokens, the number of novels (0: all)
SETS = {"train": (0.30, 6144, 14), "valid": (0.20, 8192, 0), "test": (0.55, 10240, 0)}
PIECE = 256  # tokens of a call


@torch.inference_mode()
def read_text(model: TitansForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    """Reads ids (T,): y (T, D) in float16, loss of the next token (T,), nan at the end, and entropy (T,)."""
    cache, found = TitansCache(model.config), defaultdict(list)
    hook = model.model.layers[-1].mlp.register_forward_hook(lambda _, args, __: found["y"].append(args[0][0].half()))
    for start in range(0, len(ids), PIECE):
        logits = model(ids[None, start : start + PIECE], past_key_values=cache, use_cache=True).logits[0].float()
        log_p, targets = logits.log_softmax(-1), ids[start + 1 : start + PIECE + 1, None]
        loss = -log_p[: len(targets)].gather(1, targets)[:, 0]
        found["loss"].append(pad(loss, (0, len(log_p) - len(targets)), value=math.nan))
        found["ent"].append(-(log_p.exp() * log_p).sum(-1))
    hook.remove()
    return {"ids": ids.int()} | {name: torch.cat(parts) for name, parts in found.items()}


def read_set(model: TitansForCausalLM, tokenizer: PreTrainedTokenizerBase, books: Path, name: str) -> dict[str, Tensor]:
    """Reads the novels of a set: tensors whose first dimension is the novel."""
    place, length, number = SETS[name]
    files = sorted((books / name).glob("*.txt"))
    texts = []
    for file in random.Random(0).sample(files, number) if number else files:
        text = file.read_text(encoding="utf-8", errors="replace")
        begin = text.find("\n", int(len(text) * place)) + 1
        ids = tokenizer(text[begin : begin + 8 * length], add_special_tokens=False)["input_ids"][:length]
        texts.append(read_text(model, torch.tensor(ids)))
        print(f"{name}: {file.stem}, loss {texts[-1]['loss'].nanmean():.3f}", flush=True)
    return {key: torch.stack([x[key] for x in texts]) for key in texts[0]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a converted model: a folder")
    parser.add_argument("--books", type=Path, required=True, help="a folder with the folders train, valid and test")
    parser.add_argument("--output", type=Path, required=True, help="a folder, for a file of each set")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    model, tokenizer = TitansForCausalLM.from_pretrained(args.model).eval(), AutoTokenizer.from_pretrained(args.model)
    for name in SETS:
        torch.save(read_set(model, tokenizer, args.books, name), args.output / f"{name}.pt")


if __name__ == "__main__":
    run_command(main)

"""Stores what a memory behind the last layer of a pretrained model needs to know of novels.

    titans-hf convert MODEL --output runs/windowed --window 256 --memory none
    python -m eval.studies.read_pretrained runs/windowed --data data --output runs/arrays

Of every token: y, the input of the last layer's feed-forward network; h, the input of the LM head; the loss of the next
token in nats; the entropy of the model's distribution of it; its most probable token. The data folder has novels in
books/{train,valid,test} and articles in wikitext/wiki.test.raw. With --step_rate the model learns each text by SGD
while it reads (dynamic evaluation); `memory_on_pretrained --memory window --wider` computes what that gains.
"""

import argparse
import math
import random
import re
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from titans_hf import TitansCache, TitansForCausalLM
from titans_hf.cli.shared.command_line import run_command

# For each set: the folder of its novels, where in a novel the text begins, its tokens, the number of novels (0: all)
SETS = {
    "train": ("train", 0.30, 6144, 14),
    "valid": ("valid", 0.20, 8192, 0),
    "test": ("test", 0.75, 10240, 0),
    "long": ("test", 0.0, 65536, 3),
    "beginnings": ("test", 0.0, 2049, 0),
}
ARTICLES, ARTICLE_LENGTH = 10, 5120  # the set "wikipedia": the first tokens of articles that have so many
PIECE = 256  # tokens of a call


def read_text(model: TitansForCausalLM, ids: Tensor, piece: int = PIECE, step_rate: float = 0.0) -> dict[str, Tensor]:
    """Reads ids (T,) in calls of `piece` tokens: y and h (T, D), loss of the next token (T,), nan at the end, entropy
    (T,) and the most probable next token, top (T,).

    With a `step_rate`, SGD takes a step on the mean loss of each call's tokens after the call, and the weights are put
    back at the end.
    """
    cache, found = TitansCache(model.config), defaultdict(list)
    trained = {name: x.clone() for name, x in model.state_dict().items()} if step_rate else None
    optimizer = torch.optim.SGD(model.parameters(), lr=step_rate)
    modules = {"y": model.model.layers[-1].mlp, "h": model.lm_head}
    for name, module in modules.items():
        modules[name] = module.register_forward_hook(
            lambda _, args, __, name=name: found[name].append(args[0][0].detach())
        )
    for start in range(0, len(ids), piece):
        with torch.set_grad_enabled(step_rate > 0):
            logits = model(ids[None, start : start + piece], cache=cache, use_cache=True).logits[0].float()
            log_p, targets = logits.log_softmax(-1), ids[start + 1 : start + piece + 1, None]
            loss = -log_p[: len(targets)].gather(1, targets)[:, 0]
        if step_rate and start + piece < len(ids):
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
        cache.detach()
        log_p, loss = log_p.detach(), loss.detach()  # what is kept keeps no graph
        found["loss"].append(pad(loss, (0, len(log_p) - len(targets)), value=math.nan))
        found["ent"].append(-(log_p.exp() * log_p).sum(-1))
        found["top"].append(log_p.argmax(-1))
    for hook in modules.values():
        hook.remove()
    if trained:
        model.load_state_dict(trained)
    return {"ids": ids.int()} | {name: torch.cat(parts) for name, parts in found.items()}


def load_texts(tokenizer: PreTrainedTokenizerBase, data: Path, name: str) -> dict[str, Tensor]:
    """Returns the ids (T,) of each text of a set, all of the same length."""
    if name == "wikipedia":
        text = (data / "wikitext" / "wiki.test.raw").read_text(encoding="utf-8")
        parts = re.split(r"^ = ([^=\n]+) = *$", text, flags=re.MULTILINE)[1:]
        texts = dict(zip(parts[::2], parts[1::2], strict=True))
        place, length, number = 0.0, ARTICLE_LENGTH, ARTICLES
    else:
        folder, place, length, number = SETS[name]
        files = sorted((data / "books" / folder).glob("*.txt"))
        files = random.Random(0).sample(files, number) if number else files
        texts = {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files}
    result = {}
    for title, text in texts.items():
        begin = text.find("\n", int(len(text) * place)) + 1
        ids = tokenizer(text[begin : begin + 8 * length], add_special_tokens=False)["input_ids"][:length]
        if len(ids) == length and len(result) < (number or len(texts)):
            result[title.strip()] = torch.tensor(ids)
    return result


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `read_text`."""
    parser.add_argument("--piece", type=int, default=PIECE, help="tokens of a call, and of a step")
    parser.add_argument("--step_rate", type=float, default=0.0, help="rate of SGD, in float32; 0: no steps")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a converted model: a folder")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data")
    parser.add_argument("--sets", nargs="*", choices=[*SETS, "wikipedia"], default=["train", "valid", "test"])
    add_reading_options(parser)
    parser.add_argument("--tokens", type=int, help="only the first tokens of each text")
    parser.add_argument("--output", type=Path, required=True, help="a folder, for a file of each set")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    dtype = torch.float32 if args.step_rate else "auto"
    model = TitansForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for name in args.sets:
        texts = []
        for title, ids in load_texts(tokenizer, args.data, name).items():
            texts.append(read_text(model, ids[: args.tokens], args.piece, args.step_rate))
            print(f"{name}: {title}, loss {texts[-1]['loss'].nanmean():.3f}", flush=True)
        torch.save({key: torch.stack([x[key] for x in texts]) for key in texts[0]}, args.output / f"{name}.pt")


if __name__ == "__main__":
    run_command(main)

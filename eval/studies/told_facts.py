"""Tells facts, lets a model read a novel, and asks for the facts: how many of the answers are right.

    python -m eval.studies.told_facts runs/window-256 runs/fitted-256 ORIGINAL --filler data/books/test \
        --output eval/results/told_facts.jsonl

A fact is a name, a place, a thing or a number. In the form "chat" it is told and asked for in other words, by the
model's chat template; in the form "prose" the sentence that told it is begun again; "passkey" is the usual text of that
test, one number of five digits that is told twice. An answer is right if every one of its tokens is the most probable
one after those before it, as greedy generation would write it; "digits" leaves out a space that is a token of its own.
The sentences are none of those that `titans-hf fit-memory` makes; 4 of the 12 things are, and the scaffold of the chat.
`--longest_match` answers by a search instead of a model: the token after the longest run of up to 16 tokens that ends
the text and stood in it before. It finds every fact whose sentence is begun again.
"""

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from eval.common.records import describe_commit
from eval.studies.read_pretrained import add_reading_options, read_text
from titans_hf import TitansForCausalLM
from titans_hf.cli.shared.command_line import run_command

NAMES = "Alastair Bronwyn Delphine Evander Fiorella Gulliver Jocasta Kilian Lavinia Mortimer Octavia Rufina"
PLACES = "Dunedin Galveston Ravenna Montreal Palermo Mombasa Wellington Odessa Bilbao Zanzibar Krakow Genoa"
THINGS = "trumpet hammock lantern drum wheelbarrow kettle violin teapot wardrobe bicycle ladder mirror"
VALUES = {"name": NAMES.split(), "place": PLACES.split(), "thing": THINGS.split()}
# Kind, how a fact is told, how it is asked for, how the answer begins.
FACTS = [
    ("name", "My sister is called {}.", "What is the name of my sister?", "Your sister's name is"),
    ("name", "I work for a woman named {}.", "Who is my boss?", "Your boss is"),
    ("name", "The cat answers to the name {}.", "What is the cat's name?", "The cat's name is"),
    ("place", "I was born in {}.", "Where was I born?", "Your birthplace is"),
    ("place", "Next summer we are travelling to {}.", "Where is our next holiday?", "Your next holiday is in"),
    ("place", "My brother studies in {}.", "In which city is my brother a student?", "Your brother is a student in"),
    ("thing", "For my birthday I got a {}.", "What present did I get?", "Your birthday present was a"),
    ("thing", "Grandfather left me his {}.", "What did I inherit?", "From your grandfather you inherited a"),
    ("number", "The code of my locker is {}.", "Which code opens my locker?", "Your locker opens with the code"),
    ("number", "The pass key is {}.", "What is the pass key?", "The pass key is"),
]


def make_parts(form: str, filler: str, tokenizer, choose: random.Random) -> list[tuple[str, str | None]]:
    """Returns the parts of a text in which four facts, or a pass key, are told, the filler is read, and the facts are
    asked for: each with the kind of the fact that it answers, None where it answers none.
    """
    if form == "passkey":
        key = f"{choose.randrange(10**5):05}"
        told = (
            f"There is important information in a long text. The pass key is {key}. Remember it. {key} is the pass key."
        )
        return [(f"{told}\n\n{filler}\n\nWhat is the pass key? The pass key is", None), (f" {key}", "number")]
    told, asked = [], []
    for kind in (*VALUES, "number"):
        _, statement, question, start = choose.choice([fact for fact in FACTS if fact[0] == kind])
        digits = "".join(str(choose.randrange(10)) for _ in range(choose.randint(4, 6)))
        value = choose.choice(VALUES[kind]) if kind in VALUES else digits
        told.append(statement.format(value))
        asked.append((kind, question, start, value, statement.removesuffix(" {}.")))
    choose.shuffle(asked)
    if form == "prose":
        parts = [(f"{' '.join(told)}\n\n{filler}\n\n", None)]
        for kind, _, _, value, beginning in asked:
            parts += [(beginning, None), (f" {value}", kind), (". ", None)]
        return parts
    messages = [
        {"role": "user", "content": f"Hello! Some things about me. {' '.join(told)}"},
        {"role": "assistant", "content": "Thank you, I will remember that."},
        {"role": "user", "content": f"Please read this.\n\n{filler}"},
        {"role": "assistant", "content": "I have read it."},
    ]
    first = tokenizer.apply_chat_template(messages, tokenize=False)
    parts = [(first, None)]
    for kind, question, start, value, _ in asked:
        turn = [{"role": "user", "content": question}, {"role": "assistant", "content": f"{start}@"}]
        text = tokenizer.apply_chat_template([*messages, *turn], tokenize=False)
        before, after = text[len(first) :].rsplit("@", 1)
        parts += [(before, None), (f" {value}", kind), (after, None)]
    return parts


def make_text(
    form: str, filler: str, tokenizer: PreTrainedTokenizerBase, choose: random.Random
) -> tuple[Tensor, list[tuple[int, int, str]]]:
    """Returns the ids (T,) of a text, and begin, end and kind of each answer in it."""
    ids, answers = [], []
    for part, kind in make_parts(form, filler, tokenizer, choose):
        begin = len(ids)
        ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        if kind:
            answers.append((begin, len(ids), kind))
    return torch.tensor(ids), answers


def most_probable(model: PreTrainedModel, ids: Tensor, piece: int, step_rate: float) -> Tensor:
    """Returns the most probable token after each of ids (T,); a Titans reads them piece by piece."""
    if isinstance(model, TitansForCausalLM):
        return read_text(model, ids, piece, step_rate)["top"]
    with torch.inference_mode():
        return model(ids[None], use_cache=False).logits[0].argmax(-1)


def longest_match(ids: Tensor, longest: int = 16) -> Tensor:
    """Returns what followed, the last time, the longest run of at most `longest` tokens that ends ids (T,) at each of
    its tokens and stood in them before; -1 where there is none.
    """
    after, found, text = {}, [], tuple(ids.tolist())
    for end in range(1, len(text) + 1):
        runs = [text[end - n : end] for n in range(min(longest, end), 0, -1)]
        found.append(next((after[run] for run in runs if run in after), -1))
        if end < len(text):
            after |= dict.fromkeys(runs, text[end])
    return torch.tensor(found)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders: converted models and the original")
    parser.add_argument("--filler", type=Path, required=True, help="a folder of novels")
    parser.add_argument("--forms", nargs="+", choices=["chat", "prose", "passkey"], default=["chat", "prose"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[700, 1500, 3000], help="tokens of the filler")
    parser.add_argument("--number", type=int, default=5, help="texts of each form and length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest_match", action="store_true", help="use the models' tokenizers alone, and a search")
    add_reading_options(parser)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, to which lines are added")
    args = parser.parse_args(argv)
    novels = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(args.filler.glob("*.txt"))]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for path in args.models:
        tokenizer, model = AutoTokenizer.from_pretrained(path), None
        if not args.longest_match:
            dtype = "float32" if args.step_rate else "bfloat16"
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        choose, right, asked = random.Random(args.seed), Counter(), Counter()
        cases = [(form, n) for form in args.forms for n in args.lengths for _ in range(args.number)]
        for form, length in tqdm(cases, desc=Path(path).name, unit="text"):
            novel = choose.choice(novels)
            begin = choose.randrange(len(novel) // 2)
            filler = tokenizer.decode(tokenizer(novel[begin : begin + 8 * length])["input_ids"][:length])
            ids, answers = make_text(form, filler, tokenizer, choose)
            predicted = longest_match(ids) if model is None else most_probable(model, ids, args.piece, args.step_rate)
            for start, end, kind in answers:
                is_right = predicted[start - 1 : end - 1] == ids[start:end]
                found = dict.fromkeys((form, f"{form}, {kind}", f"{form}, {length} tokens"), is_right.all())
                if kind == "number":
                    is_digit = torch.tensor([bool(tokenizer.decode(x).strip()) for x in ids[start:end]])
                    found[f"{form}, digits"] = is_right[is_digit].all()
                asked.update(found.keys())
                right.update({key: int(value) for key, value in found.items()})
        names = ("model_type", "sliding_window", "token_memory_entries")
        config = {name: getattr(model.config, name, None) for name in names} if model else {"longest_match": 16}
        config |= {"step_rate": args.step_rate, "piece": args.piece} if args.step_rate else {}
        line = {"table": "told-facts", "model": Path(path).name, "config": config, "seed": args.seed}
        line |= {"result": {key: [right[key], asked[key]] for key in asked}, "commit": describe_commit()}
        print(json.dumps(line), flush=True)
        with args.output.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    run_command(main)

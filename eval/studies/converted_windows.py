"""Measures the loss of a pretrained model on long texts by position: as it is, and converted to windows.

    python -m eval.studies.converted_windows MODEL --text FOLDER --output eval/results/convert.jsonl

Each text begins at a tenth of its characters. A line of the output is one text in one form: with full attention, with a
window and a sink, or read again: for every 16 tokens, the original reads the last tokens of a window anew, with its own
first position. Its losses are the means of consecutive ranges of tokens, in nats.
"""

import argparse
import json
import time
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GgufConfig, PreTrainedModel

from eval.common.records import describe_commit
from titans_hf import TitansCache, convert
from titans_hf.cache_titans import CACHE_NAME
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.text_files import find_files
from titans_hf.cli.shared.text_ids import encode

PIECE = 256  # tokens of a call
AGAIN = 16  # tokens that are scored before a window is read again
RANGES = (0, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


@torch.inference_mode()
def losses(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Returns the loss of every token but the first, (T - 1,), reading in pieces with a cache."""
    cache = TitansCache(model.config) if model.config.model_type == "titans" else DynamicCache()
    found, tokens = [], torch.tensor(ids)
    for start in range(0, len(ids) - 1, PIECE):
        inputs, targets = tokens[start : start + PIECE], tokens[start + 1 : start + PIECE + 1]
        logits = model(inputs[None], use_cache=True, **{CACHE_NAME: cache}).logits[0, : len(targets)].float()
        found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(found)


@torch.inference_mode()
def losses_read_again(model: PreTrainedModel, ids: list[int], window: int) -> torch.Tensor:
    """Returns the loss of every token but the first, (T - 1,), after at most the `window` tokens before it alone."""
    found, tokens = [], torch.tensor(ids)
    for start in range(0, len(ids) - 1, AGAIN):
        targets = tokens[start + 1 : start + AGAIN + 1]
        end = start + len(targets)
        inputs = tokens[max(0, end - window) : end]
        logits = model(inputs[None], use_cache=False, logits_to_keep=len(targets)).logits[0].float()
        found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(found)


def by_range(values: torch.Tensor) -> dict[str, float]:
    """Returns the mean loss of every range of positions that the text reaches to its end."""
    ranges = [(low, high) for low, high in pairwise(RANGES) if high <= len(values) + 1]
    return {f"{low}-{high}": values[low : high - 1].double().mean().item() for low, high in ranges}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a pretrained model: a folder or a name on the Hub")
    parser.add_argument("--gguf_file", help="the model's file if it is a GGUF")
    parser.add_argument("--text", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--files", type=int, default=3, help="number of files, in the order of their names")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each file")
    parser.add_argument("--window", type=int, nargs="*", default=[512], help="windows of the converted model")
    parser.add_argument("--sinks", type=int, nargs="*", default=[256], help="distances of the sink; 0 for no sink")
    parser.add_argument(
        "--full", action=argparse.BooleanOptionalAction, default=True, help="score full attention as well"
    )
    parser.add_argument("--read_again", type=int, nargs="*", default=[], help="windows that the original reads again")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the weights")
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, to which lines are added")
    args = parser.parse_args(argv)
    dtype, options, whole = getattr(torch, args.dtype), {}, {}
    if args.gguf_file:
        options, whole = {"gguf_file": args.gguf_file}, {"quantization_config": GgufConfig(dequantize=True)}
    original = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, **options, **whole).eval()
    original.config.quantization_config = None  # the weights of a GGUF are numbers of `dtype` now
    tokenizer = AutoTokenizer.from_pretrained(args.model, **options)
    forms = {"full attention": partial(losses, original)} if args.full else {}
    forms |= {
        f"window {window}, read again": partial(losses_read_again, original, window=window)
        for window in args.read_again
    }
    for window, distance in product(args.window, args.sinks):
        options = dict(sinks=int(distance > 0), memory=None, persistent_distance=distance)
        name = f"window {window}, sink at {distance}" if distance else f"window {window}, no sink"
        forms[name] = partial(losses, convert(original, window=window, **options))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for file in find_files(args.text, "--text")[: args.files]:
        text = file.read_text(encoding="utf-8")
        ids = encode(tokenizer, text[len(text) // 10 :][: 8 * args.tokens]).input_ids[: args.tokens]
        for form, measure in forms.items():
            start = time.perf_counter()
            found = by_range(measure(ids))
            line = {
                "benchmark": "converted windows", "model": Path(args.gguf_file or args.model).name, "text": file.stem,
                "form": form, "dtype": args.dtype, "tokens": len(ids), "loss": found,
                "seconds": round(time.perf_counter() - start, 1), "commit": describe_commit(),
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            with args.output.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    run_command(main)

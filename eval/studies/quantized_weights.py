"""Measures what weights of 8 or 4 bits cost: loss and distance from the model in float32, for each quantiser installed.

    python -m eval.studies.quantized_weights MODEL --text FOLDER

Of every .txt file of the folder, one stretch of `--length` tokens is read. The table has the mean loss in bits per
token (of a tokenizer of bytes: per byte), and the mean Kullback-Leibler divergence of the predictions from those in
float32, in nats per token: over all tokens and over the last eighth, where more has been read.
"""

import argparse
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from eval.studies.loss_by_position import stretches_of
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.checkpoints import load_model, load_tokenizer
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.markdown_tables import markdown_table

QUANTO = {8: "int8", 4: "int4"}
BITSANDBYTES = {8: ("int8", {"load_in_8bit": True}), 4: ("nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})}


def installed(module: str) -> bool:
    """Returns whether the module can be imported; a submodule's package is."""
    return all(importlib.util.find_spec(name) for name in (module.split(".")[0], module))


def settings(bits: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the keyword arguments of `from_pretrained` of every row, for weights of these bits."""
    yield "float32", {"dtype": torch.float32}
    yield "bfloat16", {"dtype": torch.bfloat16}
    if installed("torchao") and 8 in bits:
        from torchao.quantization import Int8WeightOnlyConfig

        yield "torchao int8", {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    if installed("optimum.quanto"):
        for name in (QUANTO[number] for number in bits):
            yield f"quanto {name}", {"quantization_config": QuantoConfig(weights=name)}
    if installed("bitsandbytes"):
        for name, options in (BITSANDBYTES[number] for number in bits):
            yield f"bitsandbytes {name}", {"quantization_config": BitsAndBytesConfig(**options)}


@torch.inference_mode()
def log_probabilities(path: str, options: dict[str, Any], stretches: Tensor) -> Tensor:
    """Returns the model's predictions for the stretches (N, T): their logarithms, (N, T, vocabulary)."""
    model = load_model(path, "MODEL", **({"dtype": torch.float32} | options)).eval()
    logits = [model(ids[None], use_cache=False).logits.float() for ids in stretches]
    return torch.cat(logits).log_softmax(-1)


def measure(found: Tensor, reference: Tensor, stretches: Tensor) -> list[str]:
    """Returns bits per token and the divergences of the predictions, as cells of the table."""
    bits = cross_entropy(found[:, :-1].flatten(0, 1), stretches[:, 1:].flatten()).item() / math.log(2)
    divergence = kl_div(found, reference, reduction="none", log_target=True).sum(-1)
    late = divergence[:, -stretches.shape[1] // 8 :]
    return [f"{bits:.4f}", f"{divergence.mean():.1e}", f"{late.mean():.1e}"]


def main(argv: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each file")
    parser.add_argument("--bits", type=int, nargs="+", choices=QUANTO, default=[8, 4], help="bits of the weights")
    args = parser.parse_args(argv)
    check_minimums(args, length=2)
    torch.set_num_threads(1)
    stretches = stretches_of(args.text, load_tokenizer(args.model, "MODEL"), args.length, 1)
    rows, reference = [], None
    for name, options in settings(args.bits):
        found = log_probabilities(args.model, options, stretches)
        reference = found if reference is None else reference
        rows.append([name, *measure(found, reference, stretches)])
    text = markdown_table(["weights", "bits per token", "divergence", "of the last eighth"], rows)
    print(text)
    return text


if __name__ == "__main__":
    run_command(main)

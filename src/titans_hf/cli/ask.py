"""Answers prompts from a memory saved by titans-hf read, without reading the texts again.

    titans-hf ask MODEL --memory DIR --prompt "The key was" --prompt "The door was"
    titans-hf ask MODEL --memory DIR     # asks for prompts, until an empty line

Every prompt is continued from the saved memory, which does not change. With --keep, each prompt and its answer are read
into the memory, which is then saved.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from titans_hf import TitansCache
from titans_hf.cli.read import load_model
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.text_ids import encode


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: TitansCache,
    prompts: list[str],
    options: GenerationConfig,
) -> list[str]:
    """Generates a continuation of each prompt after the text that `cache` (one row) has read, in one batch."""
    batch = encode(tokenizer, prompts, padding=True, padding_side="left", return_tensors="pt")
    ids, mask = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
    cache.start_prompt()
    cache.batch_repeat_interleave(len(prompts))
    sequences = model.generate(ids, attention_mask=mask, cache=cache, generation_config=options)
    return tokenizer.batch_decode(sequences[:, ids.shape[1] :], skip_special_tokens=True)


def learn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: TitansCache, text: str) -> None:
    """Reads a text into the memory."""
    ids = encode(tokenizer, text, return_tensors="pt").input_ids.to(model.device)
    with torch.inference_mode():
        model(ids, cache=cache, logits_to_keep=1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="the checkpoint that has read: a folder or a name on the Hub")
    parser.add_argument("--memory", type=Path, required=True, help="the folder that titans-hf read has saved to")
    parser.add_argument("--prompt", action="append", help="a text to be continued; may be given several times")
    parser.add_argument("--keep", action="store_true", help="prompts and answers become part of the saved memory")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="the longest answer, in tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for the most probable token")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws with a --temperature above 0")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU if there is one)")
    args = parser.parse_args(argv)
    if args.prompt is not None and not all(args.prompt):
        raise ValueError("--prompt is empty")
    check_minimums(args, max_new_tokens=1, temperature=0, seed=0)
    if args.seed >= 2**63:
        raise ValueError(f"--seed must be less than 2^63, but is {args.seed}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    model, tokenizer = load_model(args.model, args.device)
    cache = TitansCache.from_pretrained(args.memory, model)
    torch.manual_seed(args.seed)
    if tokenizer.pad_token is None:  # any token will do, because padding is masked
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    options = GenerationConfig(
        max_new_tokens=args.max_new_tokens,
        do_sample=args.temperature > 0,
        temperature=args.temperature or None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )

    def reply(prompts: list[str]) -> None:
        texts = answer(model, tokenizer, copy.copy(cache), prompts, options)
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt}{text}" if args.prompt else text, flush=True)
            if args.keep:
                learn(model, tokenizer, cache, prompt + text)
                cache.save_pretrained(args.memory, model)

    if args.prompt:
        reply(args.prompt)
        return
    while prompt := _ask():
        reply([prompt])


def _ask() -> str:
    """Reads a prompt from standard input; returns an empty string at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return ""


if __name__ == "__main__":
    run_command(main)

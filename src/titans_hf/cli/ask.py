"""Answers prompts from a memory saved by titans-hf read, without reading the texts again."""

import argparse
import copy
import sys

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from titans_hf.cache_files import read_description
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.memories import AnyCache, fingerprint_for_memories, load_cache, load_with_memory
from titans_hf.cli.shared.text_ids import decode_answer, encode, end_tokens, pad_left
from titans_hf_console import parse as parse_options


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: AnyCache,
    prompts: list[str],
    options: GenerationConfig,
) -> list[str]:
    """Generates a continuation of each prompt after the text that `cache` (one row) has read, in one batch. An answer
    ends before the first of the end tokens that `options` or the checkpoint has.

    Raises ValueError for a prompt without tokens.
    """
    rows = encode(tokenizer, prompts).input_ids
    if not all(rows):
        raise ValueError(f"--prompt {prompts[rows.index([])]!r} has no tokens")
    options = copy.deepcopy(options)
    ends = [*end_tokens(options, model.generation_config, tokenizer)]
    options.eos_token_id, options.pad_token_id = ends or None, ends[0] if ends else 0
    ids, mask = (x.to(model.device) for x in pad_left(rows))
    cache.start_prompt()
    cache.batch_repeat_interleave(len(prompts))
    sequences = model.generate(ids, attention_mask=mask, cache=cache, generation_config=options, tokenizer=tokenizer)
    texts = []
    for prompt, made in zip(rows, sequences[:, ids.shape[1] :].tolist(), strict=True):
        length = next((i for i, token in enumerate(made) if token in ends), len(made))
        texts.append(decode_answer(tokenizer, prompt, made[:length]))
    return texts


def learn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: AnyCache, text: str) -> None:
    """Reads a text into the memory."""
    ids = encode(tokenizer, text, return_tensors="pt").input_ids.to(model.device)
    with torch.inference_mode():
        model(ids, cache=cache, logits_to_keep=1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    args = parse_options("ask", argv)
    if args.prompt is not None and not all(args.prompt):
        raise ValueError("--prompt is empty")
    check_minimums(args, max_new_tokens=1, temperature=0, seed=0)
    if args.seed >= 2**63:
        raise ValueError(f"--seed must be less than 2^63, but is {args.seed}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    read_description(args.memory)  # before the weights are loaded
    logging.disable_progress_bar()  # the bar of loading weights would stand before every answer
    model, tokenizer = load_with_memory(args)
    facts = fingerprint_for_memories(model)  # hashes all weights of a Titans: once, not for every prompt
    cache = load_cache(args.memory, model, facts)
    torch.manual_seed(args.seed)
    options = GenerationConfig(max_new_tokens=args.max_new_tokens, do_sample=args.temperature > 0)
    if options.do_sample:
        options.temperature = args.temperature
    else:  # Transformers would warn of the checkpoint's settings for draws
        options.update(temperature=1.0, top_p=1.0, top_k=50)

    def reply(prompts: list[str]) -> None:
        memory = cache
        if args.keep:  # another process may have read on since the last prompt
            memory = load_cache(args.memory, model, facts)
        branch = copy.copy(memory)
        texts = answer(model, tokenizer, branch, prompts, options)
        recalled = getattr(branch, "recalled", [[]] * len(prompts))  # a Titans has none
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            if args.show_passage:
                read_again = " ... ".join(tokenizer.decode(x.ids).strip("\ufffd") for x in recalled[row])
                print(f"[read again: {read_again or 'nothing'}]", flush=True)
            print(f"{prompt}{text}" if args.prompt else text, flush=True)
            if args.keep:
                learn(model, tokenizer, memory, prompt + text)
                memory.save_pretrained(args.memory, model, model_fingerprint=facts)

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

"""Merges an adapter (LoRA) into the weights of the model that it was trained on, and saves model and tokenizer.

titans-hf merge runs/tiny-mag-lora runs/tiny-mag-merged
"""

import argparse
from pathlib import Path

from peft import AutoPeftModelForCausalLM, PeftConfig

import titans_hf  # noqa: F401  registers the model type "titans"
from titans_hf.cli.shared.checkpoints import (
    check_checkpoint,
    check_weights,
    load_config,
    load_tokenizer,
    loading_weights,
)
from titans_hf.cli.shared.command_line import run_command


def base_model(adapter: Path) -> str:
    """Returns the model that an adapter was trained on. Raises ValueError if the adapter does not load, or the model
    has no configuration.
    """
    try:
        base = PeftConfig.from_pretrained(adapter).base_model_name_or_path
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"ADAPTER {adapter}: its adapter_config.json does not load ({error})") from error
    if base is None:
        raise ValueError(f"ADAPTER {adapter}: its adapter_config.json names no base_model_name_or_path")
    load_config(base, f"ADAPTER {adapter}: its model")
    check_checkpoint(base, f"ADAPTER {adapter}: its model")
    return base


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", type=Path, help="the folder of the adapter; it names the model's")
    parser.add_argument("output", type=Path, help="a new folder for the merged model")
    args = parser.parse_args(argv)
    if not (args.adapter / "adapter_config.json").is_file():
        raise ValueError(f"ADAPTER {args.adapter} is not an adapter's folder: it has no adapter_config.json")
    if args.output.exists():
        raise ValueError(f"OUTPUT {args.output} exists: give the name of a new folder")
    tokenizer, base = load_tokenizer(args.adapter, "ADAPTER"), base_model(args.adapter)
    check_weights(args.adapter, "ADAPTER")
    with loading_weights(base, f"ADAPTER {args.adapter}: its model"):
        merged = AutoPeftModelForCausalLM.from_pretrained(args.adapter, dtype="auto").merge_and_unload()
    merged.config.use_cache = True  # Trainer saves it as false: a model that is called plainly would forget
    merged.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    run_command(main)

"""Merges an adapter (LoRA) into the weights of the model that it was trained on, and saves model and tokenizer."""

from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel

import titans_hf  # noqa: F401  registers the model type "titans"
from titans_hf.cli.shared import checkpoints
from titans_hf.cli.shared.command_line import run_command
from titans_hf_console import parse


def base_model(adapter: Path) -> str:
    """Returns the model that an adapter was trained on. Raises ValueError if the adapter does not load or cannot be
    merged, or the model has no configuration.
    """
    try:
        config = PeftConfig.from_pretrained(adapter)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"ADAPTER {adapter}: its adapter_config.json does not load ({error})") from error
    if getattr(config, "alora_invocation_tokens", None):
        raise ValueError(
            f"ADAPTER {adapter} has alora_invocation_tokens: it cannot be merged, since it acts only after these tokens"
        )
    base = config.base_model_name_or_path
    if base is None:
        raise ValueError(f"ADAPTER {adapter}: its adapter_config.json names no base_model_name_or_path")
    checkpoints.load_config(base, f"ADAPTER {adapter}: its model")
    checkpoints.check_checkpoint(base, f"ADAPTER {adapter}: its model")
    return base


def untie_embeddings(model: PreTrainedModel) -> None:
    """Gives the output embeddings weights of their own, within the wrappers of an adapter too.

    An adapter of tied embeddings changes one side of them, or each side in another way. Merged into weights that both
    sides share, it would change the other side too.
    """
    shared = {id(weight) for weight in model.get_input_embeddings().parameters()}
    for module in model.get_output_embeddings().modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) in shared:
                setattr(module, name, torch.nn.Parameter(weight.detach().clone()))


def merge_adapter(adapted: PeftModel) -> PreTrainedModel:
    """Merges the adapter into its model. The embeddings of the result are tied if the adapter leaves them equal."""
    model = adapted.get_base_model()
    tied = model.config.tie_word_embeddings
    if tied:
        untie_embeddings(model)
        model.config.tie_word_embeddings = False
    merged = adapted.merge_and_unload()
    equal = torch.equal(merged.get_input_embeddings().weight, merged.get_output_embeddings().weight)
    merged.config.tie_word_embeddings = tied and equal
    merged.tie_weights()
    return merged


def main(argv: list[str] | None = None) -> None:
    args = parse("merge", argv)
    if not (args.adapter / "adapter_config.json").is_file():
        raise ValueError(f"ADAPTER {args.adapter} is not an adapter's folder: it has no adapter_config.json")
    if args.output.exists():
        raise ValueError(f"OUTPUT {args.output} exists: give the name of a new folder")
    tokenizer, base = checkpoints.load_tokenizer(args.adapter, "ADAPTER"), base_model(args.adapter)
    model = checkpoints.load_model(base, f"ADAPTER {args.adapter}: its model", dtype="auto")
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    with checkpoints.loading_weights(args.adapter, "ADAPTER"):
        merged = merge_adapter(PeftModel.from_pretrained(model, args.adapter))
    merged.config.use_cache = True  # Trainer saves false: plain calls of the model would return no cache
    merged.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    run_command(main)

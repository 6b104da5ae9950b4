"""Makes a Titans of a pretrained Llama, Mistral, Qwen2 or Qwen3: it reads without end, in constant memory.

titans-hf convert HuggingFaceTB/SmolLM2-135M-Instruct --output smollm2-titans --fit books/

No weight of the original is trained. --fit also fits the memory behind the last layer to texts, in minutes, as
`titans-hf fit-memory` does, and prints the gain on these texts. A memory that is not fitted gains next to nothing. Up
to the window the converted model predicts as the original does. Beyond the window it predicts as the original with that
window and a sink: the first token of every text, computed once. Weights, tokenizer, chat template and generation
settings come along. Printed are the bytes of a memory beside the original's cache, and the speed on this machine.
"""

import argparse
import re
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from titans_hf import TitansCache, TitansConfig
from titans_hf.cli import fit_memory
from titans_hf.cli.shared.argument_checks import check_folder
from titans_hf.cli.shared.cards import fill_template
from titans_hf.cli.shared.checkpoints import check_weights, load_tokenizer
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf.cli.shared.text_files import find_files
from titans_hf.convert_titans import convert_checkpoint

CONTEXTS = (8192, 32768, 131072)
NUM_READ, NUM_GENERATED = 256, 16  # tokens by which the speed is measured
UNLIMITED = int(1e30)  # the length that transformers gives a tokenizer without a limit
FIT_HELP = "files, or folders of files, to fit it to; takes the options of fit-memory too, as --tokens"
NO_SINKS = "note: without a sink, tokens beyond the window cost about half a nat; --sinks 1 keeps the first position"


def open_tokenizer(path: str, gguf_file: str | None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a checkpoint. Raises ValueError where there is none, or no such GGUF file."""
    if gguf_file is None:
        return load_tokenizer(path, "MODEL")
    if find_spec("gguf") is None:
        raise ValueError("--gguf_file needs the package gguf: pip install -e '.[gguf]'")
    return AutoTokenizer.from_pretrained(path, gguf_file=gguf_file)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: TitansConfig) -> None:
    """Raises ValueError for a tokenizer that has ids outside of the model's vocabulary."""
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's vocabulary {config.vocab_size}: it is not the "
            "model's tokenizer"
        )


def stated_licence(path: str, gguf_file: str | None) -> str | None:
    """Returns the licence that a checkpoint's card or its GGUF file states; None where neither does."""
    if gguf_file is not None:
        from gguf import GGUFReader  # a package of its own, which only GGUF files need

        field = GGUFReader(Path(path) / gguf_file).fields.get("general.license") if Path(path).is_dir() else None
        return None if field is None else field.contents()
    try:
        card = Path(path) / "README.md" if Path(path).is_dir() else hf_hub_download(path, "README.md")
        return ModelCard.load(card).data.license
    except (OSError, ValueError):
        return None


def state_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of the memory of one text that is longer than the window, whatever its length."""
    states = (module.initial_state(1, model.dtype) for module in model.model.modules_with_state)
    window = original_bytes(model.config, model.config.kv_cache_length, model.dtype.itemsize)
    return window + sum(x.numel() * x.element_size() for state in states for x in state.tensors())


def original_bytes(config: TitansConfig, num_tokens: int, itemsize: int) -> int:
    """Returns the bytes of the original's keys and values of a text."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * num_tokens * itemsize


def size_table(model: PreTrainedModel) -> str:
    """Makes the table of bytes at several lengths of text."""
    ours, itemsize = state_bytes(model), torch.empty(0, dtype=model.dtype).element_size()
    rows = [
        (f"{length:,}", f"{original_bytes(model.config, length, itemsize) / 1e6:,.1f} MB", f"{ours / 1e6:,.1f} MB")
        for length in CONTEXTS
    ]
    return markdown_table(["tokens read", "original's cache", "memory"], rows)


@torch.inference_mode()
def measure_speed(folder: Path) -> str:
    """Returns how many tokens a second the written model reads and generates on this machine."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids, cache = torch.randint(model.config.vocab_size, (1, NUM_READ)), TitansCache(model.config)
    seconds = []
    for pieces in ([ids], ids[:, :NUM_GENERATED].split(1, dim=1)):
        start = time.perf_counter()
        for piece in pieces:
            model(piece, cache=cache, logits_to_keep=1)
        seconds.append(time.perf_counter() - start)
    read, generated = NUM_READ / seconds[0], NUM_GENERATED / seconds[1]
    return f"reads {read:,.0f} tokens/s, generates {generated:,.1f} tokens/s (on this machine's CPU)"


def write_card(output: Path, original: str, licence: str | None, config: TitansConfig) -> None:
    """Writes README.md: from which model, under which licence, what was changed."""
    layers = ", ".join(map(str, config.memory_layers))
    has_memory = config.token_memory_entries > 0
    text = fill_template(
        "convert",
        name=output.name,
        original=original,
        window=f"{config.sliding_window:,}",
        sinks=", and to the first position of every text, computed once" if config.num_persistent_tokens else "",
        memory=f"A memory of {config.token_memory_entries:,} entries follows the last layer." if has_memory else "",
        layers=f" Layers {layers} have a memory, which is without effect before it is trained." if layers else "",
        licence=licence or f"those of {original}, not stated there",
    )
    on_the_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", original) and not Path(original).exists()
    data = ModelCardData(
        license=licence,
        base_model=original if on_the_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["titans"],
    )
    (output / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n{text}", encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a pretrained model: a folder or a name on the Hub")
    parser.add_argument("--output", type=Path, required=True, help="a new folder for the converted model")
    parser.add_argument("--window", type=int, default=1024, help="tokens that a token attends to, itself included")
    parser.add_argument("--sinks", type=int, default=1, help="1 keeps the first position in view, 0 does not")
    parser.add_argument("--memory", choices=["episodic", "none"], default="episodic", help="behind the last layer")
    parser.add_argument("--fit", nargs="+", default=[], metavar="TEXT", help=FIT_HELP)
    parser.add_argument("--memory_layers", type=int, nargs="*", default=[], help="layers with a memory to be trained")
    parser.add_argument("--first_token", type=int, help="the id of the sink; the begin token by default")
    parser.add_argument("--gguf_file", help="the model's file if it is a GGUF")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="dtype of the weights; default: unchanged"
    )
    parser.add_argument("--max_shard_size", default="5GB", help="largest file of weights, as 500MB")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True, help="measure the speed")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args, fit_options = parser.parse_known_args(argv)
    if fit_options and not args.fit:
        parser.error(f"unrecognized arguments: {' '.join(fit_options)}")
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists: give the name of a new folder")
    check_folder(args.output, "--output")
    check_weights(args.model, "MODEL")
    if args.fit and args.memory == "none":
        raise ValueError("--fit fits the episodic memory: it cannot be given with --memory none")
    if args.fit:
        for path in args.fit:
            find_files(path, "--fit")
        fit = fit_memory.parse([args.model, "--text", *args.fit, "--output", str(args.output), *fit_options])
    if not args.sinks:
        print(NO_SINKS)
    if not args.fit:
        convert(args, args.output)
    else:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=args.output.parent) as folder:
            fit.model = str(Path(folder) / args.output.name)
            convert(args, Path(fit.model))
            fit_memory.write_fitted(fit)
    if args.speed:
        print(measure_speed(args.output))
    print(args.output)


def convert(args: argparse.Namespace, output: Path) -> None:
    """Writes the converted model, with its tokenizer and card, and prints the bytes of a memory."""
    tokenizer = open_tokenizer(args.model, args.gguf_file)
    first_token = tokenizer.bos_token_id if args.first_token is None else args.first_token
    model = convert_checkpoint(
        args.model,
        output,
        window=args.window,
        sinks=args.sinks,
        memory=None if args.memory == "none" else args.memory,
        memory_layers=args.memory_layers,
        first_token=first_token,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        max_shard_size=args.max_shard_size,
        gguf_file=args.gguf_file,
        check=lambda config: check_tokenizer(tokenizer, config),
    )
    tokenizer.model_max_length = UNLIMITED
    tokenizer.save_pretrained(output)
    original = args.model if args.gguf_file is None else args.gguf_file
    write_card(output, original, stated_licence(args.model, args.gguf_file), model.config)
    print(size_table(model))


if __name__ == "__main__":
    run_command(main)

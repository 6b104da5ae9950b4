"""Measures the speed and memory of models of equal size: Titans, and models of transformers.

    python -m scripts.bench models --models mag llama --lengths 1024 4096
    python -m scripts.bench decode --models lmm llama --contexts 256 65536
    python -m scripts.bench memory --program torch --lengths 1024 4096
    python -m scripts.bench remember --models llama --contexts 4096 --size tiny
    python -m scripts.bench gpu --output runs/gpu.jsonl

`models` has tokens per second of reading and of training, and the peak memory of training, by length; what needs more
memory than a GPU has is a row without figures. `decode` has the time of one more token and the size of the cache, by
context. Titans read all of the context; the others read its first 256 tokens, and layers with full attention get these
keys and values repeated, because the cost of a step depends on their number alone. `memory` has the layer of a memory
alone. `remember` has a random model of another kind, with full attention and with the memory of `remember`: the rate of
reading in pieces, the time of one more token, and the peak memory. `gpu` runs all that is asked of a GPU.

Times are processor time of one thread in float32, and wall-clock time on a GPU. Before a model is timed, a step with
its cache must give the logits of the whole text. Models that are compared by `decode` take turns, so that ratios hold
on a busy machine; `models` takes the least of several times.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from eval.common.compared_models import VARIANTS, fit_config, parse_settings
from eval.common.records import append_record, describe_commit
from scripts import memory_alone, on_a_gpu
from scripts.measure import least_seconds, peak_bytes, seconds, unless_out_of_memory
from titans_hf import MemoryCache, Passages, TitansConfig
from titans_hf import remember as give_memory
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.devices import choose_device
from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf_console import HelpFormatter

NAMES = (*VARIANTS, "llama", "mistral", "mamba2", "qwen3-next", "olmo-hybrid", "gated-deltanet")
WITHOUT_CACHE = "gated-deltanet"  # a Qwen3-Next without attention, of which transformers cannot keep a cache
SHAPE = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": True}
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SIZES = {  # the fields, and the number of parameters
    "tiny": ((128, 4, 4, 259), 1_030_000),
    "30m": ((384, 8, 6, 32_000), 30_000_000),
    "170m": ((768, 12, 12, 32_000), 170_000_000),
    "340m": ((1024, 24, 16, 32_000), 340_000_000),
}
REMEMBERING = {  # the configurations of Llama-3.2-1B and Qwen3-1.7B, and small ones
    "llama": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256},
    "qwen3": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 259}
FULL_ATTENTION = "full attention"
MEMORIES = (FULL_ATTENTION, "window", "passages")
WINDOWS_READ = 4  # windows that a model with a memory has read: later tokens cost as much
CHECKED_TOKENS, READ_TOKENS, TOKENS_PER_CALL = 200, 256, 4096
COUNTS = ("lengths", "repeats", "contexts", "steps", "pieces", "tokens", "heads", "batch_size")


def build(name: str, args: argparse.Namespace) -> PreTrainedModel:
    """Builds a model of about the size's parameters with random weights, always the same ones, and checks its cache.

    Raises ValueError for a setting that is not possible.
    """
    settings, (shape, parameters) = parse_settings(args.set, TitansConfig()), SIZES[args.size]
    sizes = SHAPE | dict(zip(FIELDS, shape, strict=True)) | (settings if name in VARIANTS else {})
    config = fit_config(name, parameters, sizes)
    torch.manual_seed(0)
    with args.device:
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, args.dtype)).eval()
    if name != WITHOUT_CACHE:
        check(model)
    return model


def draw_tokens(model: PreTrainedModel, length: int, rows: int = 1) -> Tensor:
    """Draws token ids (rows, length) on the model's device."""
    return torch.randint(2, model.config.vocab_size, (rows, length), device=model.device)


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor, **given: Any) -> tuple[Tensor, dict[str, Any]]:
    """Reads ids with a cache: the last logits, and the cache by the name of the argument that takes it."""
    output = model(ids, use_cache=True, logits_to_keep=1, **given)
    name = next(name for name in ("cache", "cache_params") if name in output)  # the last is Mamba's
    return output.logits[:, -1], {name: output[name]}


@torch.no_grad()
def check(model: PreTrainedModel) -> None:
    """Raises AssertionError unless a step with the cache gives the logits of the whole text."""
    ids = draw_tokens(model, CHECKED_TOKENS)
    step = read(model, ids[:, -1:], **read(model, ids[:, :-1])[1])[0].double()
    whole = model(ids).logits[:, -1].double()
    distance, most = (step - whole).norm() / whole.norm(), 1e-3 if model.dtype == torch.float32 else 0.1
    if not distance <= most:
        raise AssertionError(f"{type(model).__name__}: a step is off by {distance:.1e} of its length, above {most:g}")


def forward(model: PreTrainedModel, ids: Tensor) -> None:
    """Reads ids without gradients."""
    with torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)


def train(model: PreTrainedModel, ids: Tensor) -> None:
    """Computes the gradients of the loss of ids."""
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()


def models(args: argparse.Namespace) -> Iterator[dict]:
    """Times every model at every length; yields a row of each."""
    for name in args.models:
        model = build(name, args)
        for length in args.lengths:
            ids, tokens = draw_tokens(model, length, args.batch_size), args.batch_size * length
            row = {"model": name, "tokens": length, "parameters": model.num_parameters()}
            row |= {"batch": args.batch_size}
            for what, run in (("read", forward), ("train", train)):
                run_once = partial(run, model, ids)
                least = unless_out_of_memory(partial(least_seconds, run_once, args.device, args.repeats))
                row[f"{what} tokens/s"] = least and tokens / least
            peak = unless_out_of_memory(partial(peak_bytes, partial(train, model, ids), args.device))
            row["train peak KB/token"] = peak and peak / 1e3 / tokens
            model.zero_grad()  # what a backward without enough memory has left
            yield row


def cache_of(model: PreTrainedModel, context: int, rows: int = 1) -> dict[str, Any]:
    """Returns the cache of `context` tokens of each row by the name of its argument."""
    titans, given = model.config.model_type == "titans" or hasattr(model, "memory"), {}
    ids = draw_tokens(model, context if titans else min(context, READ_TOKENS), rows)
    for piece in ids.split(TOKENS_PER_CALL, dim=1):
        given = read(model, piece, **given)[1]
    for layer in () if titans else next(iter(given.values())).layers:
        if isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer):
            columns = torch.arange(context, device=layer.keys.device) % ids.shape[1]
            layer.keys, layer.values = layer.keys[:, :, columns], layer.values[:, :, columns]
    return given


def decode(args: argparse.Namespace) -> Iterator[dict]:
    """Times the steps of every model after each context; yields a row of each."""
    for name in args.models:
        model = build(name, args)
        caches = {context: cache_of(model, context) for context in args.contexts}
        sizes = [num_bytes(cache) for cache in caches.values()]
        if args.compile:
            model.compile()
        steps = [partial(read, model, draw_tokens(model, 1), **cache) for cache in caches.values()]
        # All contexts in turn, so that other processes slow each of them equally.
        rounds = [[seconds(step, args.device) for step in steps] for _ in range(args.steps + 3)][3:]
        for i, context in enumerate(args.contexts):
            row = {"model": name, "context": context, "ms/token": 1e3 * median(times[i] for times in rounds)}
            yield row | {"of the first": median(x[i] / x[0] for x in rounds), "cache MB": sizes[i] / 1e6}


def make_remembering(name: str, memory: str, args: argparse.Namespace) -> PreTrainedModel:
    """Makes a model with random weights, always the same ones, and gives it a memory."""
    torch.manual_seed(0)
    sizes = TINY if args.size == "tiny" else REMEMBERING[name]
    config = AutoConfig.for_model(name, **SHAPE | sizes | {"max_position_embeddings": 1 << 20})
    with args.device:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
    passages = Passages() if memory == "passages" else None
    return model if memory == FULL_ATTENTION else give_memory(model, args.window, passages=passages, first_token=2)


def remember(args: argparse.Namespace) -> Iterator[dict]:
    """Times reading in pieces and decoding of every model, memory and context; yields a row of each."""
    for name, memory in product(args.models, MEMORIES):
        model = make_remembering(name, memory, args)
        for context in args.contexts if memory == FULL_ATTENTION else [WINDOWS_READ * args.window]:
            given = cache_of(model, context, args.batch_size)
            held = num_bytes(given)
            rows = []
            for piece in args.pieces:
                pieces = draw_tokens(model, args.tokens, args.batch_size).split(piece, dim=1)
                run = partial(read_pieces, model, pieces, given)
                row = {"model": name, "memory": memory, "context": context, "piece": piece}
                row["read tokens/s"] = args.batch_size * args.tokens / least_seconds(run, args.device, 1)
                rows.append(row | {"read peak MB": peak_bytes(run, args.device) / 1e6})
            step = partial(read, model, draw_tokens(model, 1, args.batch_size), **given)
            decoding = 1e3 * median(seconds(step, args.device) for _ in range(args.steps + 3))
            yield from (row | {"decode ms/token": decoding, "cache MB": held / 1e6} for row in rows)


def read_pieces(model: PreTrainedModel, pieces: Sequence[Tensor], given: dict[str, Any]) -> None:
    """Reads pieces of a text with one cache."""
    for piece in pieces:
        read(model, piece, **given)


def num_bytes(held: object) -> int:
    """Counts the bytes of all tensors that a cache holds."""
    if isinstance(held, MemoryCache):
        return sum(held.num_bytes().values())
    if isinstance(held, Tensor):
        return held.numel() * held.element_size()
    if isinstance(held, dict):
        held = list(held.values())
    if isinstance(held, (list, tuple)):
        return sum(map(num_bytes, held))
    return num_bytes(vars(held)) if type(held).__module__.startswith(("transformers", "titans_hf")) else 0


def cell(value: object) -> str:
    """Formats a number with three digits, or all of them before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    about = {"description": __doc__, "formatter_class": HelpFormatter}
    for benchmark, size in ((models, "tiny"), (decode, "30m"), (remember, "1b"), (memory_alone.memory, None)):
        command = commands.add_parser(benchmark.__name__, help=benchmark.__doc__, **about)
        command.set_defaults(run=benchmark, size=None, set=[])
        if benchmark is remember:
            command.add_argument("--models", nargs="+", choices=REMEMBERING, default=list(REMEMBERING))
            command.add_argument("--size", choices=("tiny", size), default=size)
            command.add_argument("--contexts", type=int, nargs="+", default=[32768, 131072], help="of full attention")
            command.add_argument("--pieces", type=int, nargs="+", default=[64, 256, 1024], help="tokens of a call")
            command.add_argument("--tokens", type=int, default=4096, help="tokens that are read in pieces")
            command.add_argument("--window", type=int, default=1024)
            command.add_argument("--batch_size", type=int, default=1)
        else:
            if size:
                command.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES[:-1]))
                command.add_argument("--size", choices=SIZES, default=size)
            else:
                command.description = memory_alone.__doc__
                command.add_argument("--program", choices=memory_alone.PROGRAMS, default="torch")
                command.add_argument("--heads", type=int, default=6, help=f"heads of {memory_alone.HEAD_DIM}")
            command.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of Titans' configs")
        command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        if benchmark in (models, memory_alone.memory):
            command.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 8192, 32768])
            command.add_argument("--batch_size", type=int, default=1 if benchmark is models else 2)
            command.add_argument("--repeats", type=int, default=5, help="times that each is measured")
        else:
            command.add_argument("--steps", type=int, default=20)
        if benchmark is decode:
            command.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 16384, 65536])
            command.add_argument("--compile", action="store_true", help="compile the models by torch.compile")
    command = commands.add_parser("gpu", help="Runs all that is asked of a GPU.", **about)
    command.description = on_a_gpu.__doc__
    command.add_argument("--parts", nargs="+", choices=on_a_gpu.PARTS, default=list(on_a_gpu.PARTS), metavar="PART")
    command.add_argument("--seconds", type=float, default=120, help="most that a part may take alone")
    command.add_argument("--seconds_of_short_texts", type=float, default=300, help="most that all at once may take")
    command.add_argument("--smallest", action="store_true", help="tiny models and short texts, as for a CPU")
    for name, command in commands.choices.items():
        command.add_argument("--device", default="cuda" if name == "gpu" else "cpu")
        command.add_argument("--output", type=Path, help="a JSON Lines file, to which rows are added")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    check_minimums(args, **{name: 1 for name in COUNTS if name in args})
    if args.benchmark == "gpu":
        return on_a_gpu.run_parts(args)
    args.device = choose_device(args.device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it seems to plan anew for each length of a cache
    torch.set_num_threads(1)
    rows = []
    for row in args.run(args):
        rows.append(row)
        print(*row.values(), flush=True)
        if args.output:
            device = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "CPU"
            about = {"benchmark": args.benchmark, "size": args.size, "set": args.set, "dtype": args.dtype}
            append_record(about | row | {"device": device, "commit": describe_commit()}, args.output)
    print(markdown_table(list(rows[0]), [[*map(cell, row.values())] for row in rows]))


if __name__ == "__main__":
    run_command(main)

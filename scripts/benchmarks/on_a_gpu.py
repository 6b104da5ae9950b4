"""All that is asked of a GPU in one command: parts by the other benchmarks, a folder of --output each.

memory-FORM    the memory alone: its share of the rate of large bfloat16 products, measured in the same run
models-SIZE    training beside a Llama with flash attention (PyTorch's own, sdpa), and, where the packages of their
               kernels are installed, Gated DeltaNet (flash-linear-attention) and Mamba2 (mamba_ssm)
models-SIZE-delta    the Titans alone, with the delta form
decode-SIZE    one more token, beside Llama
decode-SIZE-with-kernels    the Titans alone, with the project's kernels

A length at which a model's training needs more memory than there is has a row without figures. A part that fails says
why, and the next part begins.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from transformers.utils.import_utils import is_flash_linear_attention_available, is_mamba_2_ssm_available

from . import model_shapes

FORMS = {
    "titans": ["memory_form=titans"],
    "titans-with-kernels": ["memory_form=titans", "memory_kernel=triton"],
    "delta": ["memory_form=delta"],
    "delta-without-kernel": ["memory_form=delta", "memory_kernel=torch"],
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=model_shapes.SIZES, default=["170m", "340m"])
    parser.add_argument("--models", nargs="+", choices=model_shapes.NAMES, default=[*model_shapes.VARIANTS, "llama"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1 << n for n in range(11, 18)])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1 << n for n in range(10, 17, 2)])
    parser.add_argument(
        "--batch_size", type=int, default=4, help="rows of 16 heads that the memory alone reads at once"
    )
    parser.set_defaults(device="cuda", repeats=3)


def parts(args: Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each part and its command line."""
    lengths, repeats = ["--lengths", *map(str, args.lengths)], ["--repeats", str(args.repeats)]
    memory = ["--chunks", "64", "--heads", "16", "--batch_size", str(args.batch_size), *repeats]
    for form, settings in FORMS.items():
        yield f"memory-{form}", ["memory", *lengths, *memory, "--set", *settings]
    recurrences = {"gated-deltanet": is_flash_linear_attention_available, "mamba2": is_mamba_2_ssm_available}
    installed = [name for name, is_available in recurrences.items() if is_available()]
    titans = [name for name in args.models if name in model_shapes.TITANS]
    for size in args.sizes:
        models = ["--size", size, "--dtype", "bfloat16", "--models"]
        yield f"models-{size}", ["models", *models, *args.models, *installed, *lengths, *repeats]
        if titans:
            yield f"models-{size}-delta", ["models", *models, *titans, *lengths, *repeats, "--set", *FORMS["delta"]]
        contexts = ["--contexts", *map(str, args.contexts)]
        yield f"decode-{size}", ["decode", *models, *args.models, *contexts]
        if titans:
            kernels = FORMS["titans-with-kernels"]
            yield f"decode-{size}-with-kernels", ["decode", *models, *titans, *contexts, "--set", *kernels]

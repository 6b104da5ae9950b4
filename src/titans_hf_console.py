"""The command `titans-hf`: its subcommands are the modules of `titans_hf.cli`.

This module lies beside the package, because importing anything of the package imports torch and transformers first.
That takes seconds, which `titans-hf --help` does not need.
"""

import __future__

import ast
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec

TRANSFORMERS_CLI = "titans_hf.cli.serve"
# By name: the module whose `main()` a command runs, a summary, and the extra of the wheel that it needs.
COMMANDS = {
    "train": ("titans_hf.cli.train", "train or fine-tune a causal language model", "train"),
    "fit": ("titans_hf.cli.fit", "fit a memory to texts, for any causal language model", None),
    "merge": ("titans_hf.cli.merge", "merge a LoRA adapter into its model", "finetune"),
    "read": ("titans_hf.cli.read", "read texts into a memory and save it", "train"),
    "ask": ("titans_hf.cli.ask", "answer prompts from a saved memory", "train"),
    "surprise": ("titans_hf.cli.surprise", "show how much each word changed the memory", "train"),
    "serve": (TRANSFORMERS_CLI, "serve a checkpoint over HTTP, with OpenAI's API", "serve"),
    "chat": (TRANSFORMERS_CLI, "chat with a served checkpoint", "serve"),
    "forecast": ("titans_hf.cli.forecast", "forecast the time series of a CSV file", "train"),
    "lm-eval": ("titans_hf.cli.lm_eval_command", "run lm-eval's own command line, for any task", "eval"),
    "demo": ("titans_hf.cli.demo", "train two small models and compare their recall", "demo"),
}
# Transformers and lm-eval make the help of these commands; `argparse` alone makes the help of the others.
OTHER_PARSERS = {"serve", "chat", "lm-eval"}


def usage() -> str:
    """Returns the help of `titans-hf`."""
    rows = "\n".join(f"  {name:<12}{summary}" for name, (_, summary, _) in COMMANDS.items())
    return (
        f"usage: titans-hf COMMAND [options]\n\ncommands:\n{rows}\n\n"
        "titans-hf COMMAND --help shows the options of a command, titans-hf --version the version.\n"
        "An error is one line; with TITANS_HF_DEBUG=1 in the environment its traceback is shown."
    )


def main() -> None:
    """Runs the subcommand that `sys.argv` names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(f"titans-hf {version('titans-hf')}")
    elif name in COMMANDS:
        if sys.argv[2:] in (["-h"], ["--help"]) and name not in OTHER_PARSERS and "titans_hf" not in sys.modules:
            show_help(name)
        import_module("titans_hf.cli.shared.command_line").run_command(partial(_run, name))
    else:
        print(f"titans-hf: error: there is no command {name}, only {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)


class _StandardLibraryAlone(MetaPathFinder):
    """Refuses to import anything but the standard library and the package's own modules."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in {"titans_hf", *sys.stdlib_module_names}:
            raise ModuleNotFoundError(f"{fullname} is not needed for help", name=fullname)


def show_help(name: str) -> None:
    """Shows a command's help without importing torch and transformers, which takes seconds, and exits.

    A command parses its arguments before anything else. So its module is run without the statements that need other
    packages, and its `main` ends when its parser has shown the help.
    """
    sys.meta_path.insert(0, _StandardLibraryAlone())
    sys.modules["titans_hf"] = module_from_spec(find_spec("titans_hf"))  # without running its __init__
    sys.argv = [f"titans-hf {name}", "--help"]
    spec = find_spec(COMMANDS[name][0])
    tree = ast.parse(spec.loader.get_source(spec.name))
    module = {"__name__": spec.name, "__doc__": ast.get_docstring(tree, clean=False)}
    for statement in tree.body:
        code = ast.Module([statement], type_ignores=[])
        with suppress(ImportError, NameError):
            exec(compile(code, spec.origin, "exec", __future__.annotations.compiler_flag), module)
    module["main"]()


def _run(name: str) -> None:
    """Imports the command's module and runs its `main`. Raises ModuleNotFoundError that names the extra to install."""
    module, _, extra = COMMANDS[name]
    # transformers' command line parses `serve` and `chat` itself; the others parse the arguments after their own name.
    sys.argv[:2] = ["titans-hf", name] if module == TRANSFORMERS_CLI else [f"titans-hf {name}"]
    try:
        main = import_module(module).main
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").startswith("titans_hf"):
            raise
        missing = (error.name or "").partition(".")[0]
        raise ModuleNotFoundError(
            f'the package {missing} is missing: pip install -e ".[{extra}]"', name=missing
        ) from error
    main()

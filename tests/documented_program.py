"""Stands in for a program that a page calls: runs it with tiny options, or records why it is not run. It has the
program's name on the PATH of `documentation.run_bash`; with DRY_RUN set, nothing is run.
"""

import os
import subprocess
import sys

import documentation

MODULES = {"titans-hf": "titans_hf", "torchrun": "torch.distributed.run", "lm_eval": "lm_eval", "trl": "trl.cli.main"}


def main(program: str, arguments: list[str]) -> int:
    command = " ".join([program, *arguments])
    with open(os.environ["CALLED"], "a") as log:
        log.write(command.replace("\n", " ") + "\n")
    treatment = documentation.treatment(command)
    if treatment is None:
        print(f"no treatment for: {command}", file=sys.stderr)
        return 97
    if treatment.not_run or os.environ.get("DRY_RUN"):
        return 0
    start = [sys.executable] if program == "python" else [sys.executable, "-m", MODULES[program]]
    environment = os.environ | {"PATH": "/usr/bin:/bin"}  # what the program itself calls is no matter of the page
    return subprocess.run([*start, *arguments, *treatment.options.split()], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(os.path.basename(sys.argv[1]), sys.argv[2:]))

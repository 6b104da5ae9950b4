"""Runs titans-hf read once per command line (JSON) on standard input, in a fork that need not import anything; prints
the process's id, and its exit code at the end.
"""

import json
import os
import sys

from titans_hf.cli import read

for line in sys.stdin:
    if (process := os.fork()) == 0:
        code = 1
        try:
            read.main(json.loads(line))
            code = 0
        finally:
            os._exit(code)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)

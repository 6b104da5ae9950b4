"""Runs the Python example of a model card, which loads its checkpoint where titans_hf is not installed."""

import re
import sys
from pathlib import Path

import torch

folder, name = sys.argv[1:]
torch.set_num_threads(1)
(alone,) = re.findall(r"```python\n(.*?)```", Path(folder, "README.md").read_text(), re.DOTALL)
assert "trust_remote_code=True" in alone
exec(alone.replace(f'"{name}"', repr(folder)))
assert "titans_hf" not in sys.modules

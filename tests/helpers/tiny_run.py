"""Configurations for the tests of titans-hf train, a stand-in for its time limit, and what a run has written."""

import json
import sys
from pathlib import Path
from typing import ClassVar

from transformers import TrainerCallback

SCRIPT = Path(__file__).parents[2] / "src" / "titans_hf" / "cli" / "train.py"
# Not `accelerate launch --cpu`: without a configuration file it starts a single process.
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
LLAMA = {"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64}
LLAMA |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
TITANS = LLAMA | {"model_type": "titans", "variant": "mag", "head_dim": 16, "memory_chunk_size": 8}
TITANS |= {"sliding_window": 16, "segment_length": 16}
SHORT = dict(max_steps=2, eval_steps=2, save_steps=2)


def losses(folder, key):
    """Returns the steps and values that a run has logged under a key."""
    history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [(log["step"], log[key]) for log in history if key in log]


def real_tokens(blocks):
    """Returns the tokens of all blocks, joined."""
    return [token for block in blocks for token in block["input_ids"].tolist()]


class StopAt(TrainerCallback):
    """Stands in for TimeLimit: --max_minutes is the step to stop at, and `steps` records the steps made."""

    steps: ClassVar[list[int]] = []

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)
        if state.global_step == self.step:
            control.should_training_stop = True

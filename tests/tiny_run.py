"""Configurations for the tests of scripts/train.py, its distributed launch, and a stand-in for its time limit."""

import sys
from pathlib import Path
from typing import ClassVar

from transformers import TrainerCallback

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
# Not `accelerate launch --cpu`: without a configuration file it starts a single process.
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TITANS = LLAMA | {
    "model_type": "titans",
    "variant": "mag",
    "head_dim": 16,
    "sliding_window": 16,
    "segment_length": 16,
    "memory_chunk_size": 8,
}


class StopAt(TrainerCallback):
    """Stands in for TimeLimit: --max_minutes is the step to stop at, and `steps` records the steps made."""

    steps: ClassVar[list[int]] = []

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)
        if state.global_step == self.step:
            control.should_training_stop = True

"""cli/configs/accelerate: training launched on two processes as in docs/train.md equals training on one."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import TITANS

CONFIGS = Path(__file__).parents[2] / "src" / "titans_hf" / "cli" / "configs" / "accelerate"
OPTIONS = "--config config.json --tokenizer bytes --train_data text.txt --eval_data text.txt --block_length 32 "
OPTIONS += "--tokens_per_step 128 --max_steps 4 --eval_steps 4 --save_steps 4 --use_cpu true --bf16 false"


def train(folder: Path, output: str, batch: int, *launches: list[str]) -> None:
    """Trains by commands that are launched side by side in `folder`."""
    own = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    given = [*OPTIONS.split(), "--output_dir", output, "--per_device_train_batch_size", str(batch)]
    options = dict(cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=300)
    with ThreadPoolExecutor() as pool:
        commands = [[sys.executable, "-m", *launch, *given] for launch in launches]
        done = list(pool.map(lambda command: subprocess.run(command, **options), commands))
    assert not any(x.returncode for x in done), "\n".join(x.stderr[-4000:] for x in done)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_train_like_one(tmp_path):
    """Training by DDP on two machines of one process each saves the weights of one process."""
    (tmp_path / "text.txt").write_text("".join(f"The key is {number}, said the captain.\n" for number in range(400)))
    (tmp_path / "config.json").write_text(json.dumps(TITANS))
    train(tmp_path, "alone", 4, ["titans_hf", "train"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launch = ["accelerate.commands.launch", "--num_processes", "2", "--config_file", str(CONFIGS / "ddp.yaml")]
    launch += ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port, "--machine_rank"]
    train(tmp_path, "ddp", 2, *([*launch, rank, "-m", "titans_hf", "train"] for rank in "01"))
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "ddp"))
    assert (tmp_path / "ddp" / "checkpoint-4" / "rng_state_1.pth").exists()  # the second process was there
    assert found.keys() == expected.keys()
    for parameter, value in expected.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-4, atol=1e-6, msg=parameter)

"""cli/configs/accelerate: training launched on two processes as in docs/train.md equals training on one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import TITANS

CONFIGS = Path(__file__).parents[2] / "src" / "titans_hf" / "cli" / "configs" / "accelerate"


@pytest.fixture
def start(tmp_path):
    """Starts a training, given what launches it, its folder and its batch -> the process."""
    (tmp_path / "text.txt").write_text("".join(f"The key is {number}, said the captain.\n" for number in range(400)))
    (tmp_path / "config.json").write_text(json.dumps(TITANS))
    options = "--config config.json --tokenizer bytes --train_data text.txt --eval_data text.txt --block_length 32 "
    options += "--tokens_per_step 128 --max_steps 4 --eval_steps 4 --save_steps 4 --use_cpu true --bf16 false"
    own = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def start(launch: list[str], output: str, batch: int) -> subprocess.Popen:
        command = [sys.executable, "-m", *launch, *options.split(), "--output_dir", output]
        with (tmp_path / f"{output}-{len(list(tmp_path.glob('*.log')))}.log").open("w") as log:
            return subprocess.Popen(
                [*command, "--per_device_train_batch_size", str(batch)],
                cwd=tmp_path,
                env=os.environ | own,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    return start


def wait(processes: list[subprocess.Popen], folder: Path) -> None:
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), "\n".join(log.read_text()[-4000:] for log in folder.glob("*.log"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_train_like_one(start, tmp_path):
    """Training by DDP on two machines of one process each saves the weights of one process."""
    wait([start(["titans_hf", "train"], "alone", 4)], tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launch = ["accelerate.commands.launch", "--num_processes", "2", "--config_file", str(CONFIGS / "ddp.yaml")]
    launch += ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port, "--machine_rank"]
    wait([start([*launch, rank, "-m", "titans_hf", "train"], "ddp", 2) for rank in "01"], tmp_path)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "ddp"))
    assert (tmp_path / "ddp" / "checkpoint-4" / "rng_state_1.pth").exists()  # the second process was there
    assert found.keys() == expected.keys()
    for parameter, value in expected.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-4, atol=1e-6, msg=parameter)

"""The models to evaluate: checks of their folders, fingerprints, and lm-eval's classes for them."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import titans_hf  # noqa: F401  registers the model type "titans"
from titans_hf.cli.evaluation.titans_lm import TitansLM
from titans_hf.cli.shared.checkpoints import check_checkpoint, load_config, load_tokenizer, loading_weights

# Files that a checkpoint's scores depend on; a README or a trainer's state may change.
PARTS = ("*.safetensors", "*.bin", "*.py", "config.json", "generation_config.json", "*token*", "vocab*", "merges*")


@dataclass(frozen=True)
class Checkpoint:
    """A folder or a name on the Hub. `fingerprint` changes with its weights, configuration and tokenizer."""

    path: str
    label: str
    model_type: str
    fingerprint: str
    tokenizer: PreTrainedTokenizerBase


def read_checkpoints(paths: list[str]) -> list[Checkpoint]:
    """Reads checkpoints, only the headers of their weights, and labels each by its folder's name.

    Raises ValueError for a path that is no checkpoint, for damaged weights, for a missing tokenizer, and for two
    checkpoints of one label.
    """
    labels = [Path(path).resolve().name if Path(path).exists() else path.replace("/", "--") for path in paths]
    if twice := [label for label, number in Counter(labels).items() if number > 1]:
        raise ValueError(f"two models are called {twice[0]}: their folders' names label the results")
    return [_read(path, label) for path, label in zip(paths, labels, strict=True)]


def trained_length(paths: list[str]) -> int | None:
    """Returns the block length that all models were trained on, by run.json; None if one has none or they differ."""
    runs = [Path(path) / "run.json" for path in paths]
    if not all(run.is_file() for run in runs):
        return None
    arguments = [json.loads(run.read_text(encoding="utf-8")).get("arguments", {}) for run in runs]
    lengths = {given.get("block_length") for given in arguments}
    return lengths.pop() if len(lengths) == 1 else None


def _read(path: str, label: str) -> Checkpoint:
    folder = Path(path)
    if folder.exists() and not ((folder / "config.json").is_file() and _files(folder, ("*.safetensors", "*.bin"))):
        raise ValueError(f"MODEL {path} is not a checkpoint: it holds no config.json with weights")
    check_checkpoint(path, "MODEL")
    config, tokenizer = load_config(path, "MODEL"), load_tokenizer(path, "MODEL")
    fingerprint = digest(_files(folder, PARTS)) if folder.exists() else f"{path}@{config._commit_hash}"
    return Checkpoint(path, label, config.model_type, fingerprint, tokenizer)


def _files(folder: Path, patterns: Iterable[str]) -> tuple[Path, ...]:
    return tuple(sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}))


@cache
def digest(paths: tuple[Path, ...]) -> str:
    """Hashes the contents of files and folders; 16 hexadecimal digits."""
    total = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                with file.open("rb") as stream:
                    total.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()[:16]


class CountingHFLM(HFLM):
    """lm-eval's "hf", which also counts the tokens that it cuts from prompts longer than the model's limit."""

    cut_tokens = 0

    def _loglikelihood_tokens(self, requests: list[tuple], *args, **kwargs) -> list[tuple[float, bool]]:
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        self.cut_tokens += sum(max(0, length - self.max_length - 1) for length in lengths)
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def tok_batch_encode(self, strings: list[str], padding_side="left", left_truncate_len=None, truncation=False):
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len is None:
            return ids, mask
        self.cut_tokens += _cut(mask, left_truncate_len)
        return ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]


def _cut(mask: Tensor, keep: int) -> int:
    return int((mask.sum(1) - keep).clamp(min=0).sum())


def load_lm(
    checkpoint: Checkpoint, batch_size: int, device: str | None, dtype: str, max_length: int | None
) -> TitansLM | CountingHFLM:
    """Loads lm-eval's model; a Titans checkpoint takes prompts of any length."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {"pretrained": checkpoint.path, "batch_size": batch_size, "device": device, "dtype": dtype}
    with loading_weights(checkpoint.path, "MODEL"):
        if checkpoint.model_type == "titans":
            return TitansLM(**options)
        return CountingHFLM(**options, max_length=max_length)

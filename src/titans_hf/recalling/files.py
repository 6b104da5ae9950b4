"""A `MemoryCache` as a folder: see `cache_files`, which writes, reads and checks it."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache_files import (
    AUTOCAST,
    check_tensor,
    naming_folder,
    read_description,
    read_memory,
    weight_facts,
    write_memory,
)
from .rows import NO_TOKEN, Rows
from .window import KEYS, MARKS, RowLayer

NUMBER = 64  # of numbers of each weight that the fingerprint depends on
MARKED = rf"\.({'|'.join(MARKS)})\."  # in the name of an earlier state
MOST_TOKENS = 2**31  # of a row


def save(cache: Cache, folder: str | os.PathLike, fingerprint: dict[str, Any]) -> None:
    """Saves a cache, and the `memory_fingerprint` of its model. Rows that have read nothing have no state in the file.

    Raises ValueError or OSError that names the folder, whose memory stays. If another process has saved there since
    this cache was loaded or saved there, this memory goes into a folder beside it, and the error names both.
    """
    rows = cache.rows
    tensors = {"seen": rows.seen, "asked": rows.asked, "first_column": torch.tensor(cache.first_column)}
    tensors |= {} if rows.text is None else {"text": rows.text}
    tensors |= layer_tensors(rows.layers) if rows.seen.any() else {}
    description = {"model": fingerprint, "tokens_seen": rows.seen.tolist(), "about": cache.about}
    counts = {"num_columns": cache.num_columns, "record_past": False}
    write_memory(folder, description, tensors, cache.seen_in_folders, **counts)


def load(cache: Cache, folder: str | os.PathLike, model: PreTrainedModel, fingerprint: dict[str, Any]) -> Cache:
    """Fills a new cache from a folder, for a model with a `memory_fingerprint`.

    Raises FileNotFoundError for a folder without a memory, ValueError that names the folder for a memory of another
    model, of a former kind or a damaged one.
    """
    with naming_folder(folder, "loaded"):
        if "memory" in read_description(folder)["model"]:
            raise ValueError("it is of a former kind, with fast weights or a list: read its texts again")
    description, tensors, num_columns, _ = read_memory(folder, fingerprint)
    cache.seen_in_folders[Path(folder).resolve()] = description
    with naming_folder(folder, "loaded"):
        whole, vocabulary = (torch.int64,), model.get_input_embeddings().weight.shape[0]
        cache.about = dict(description["about"])
        seen = check_tensor("seen", tensors.pop("seen"), (None,), whole, end=MOST_TOKENS)
        asked = check_tensor("asked", tensors.pop("asked"), seen.shape, whole, end=MOST_TOKENS)
        first = check_tensor("first_column", tensors.pop("first_column"), (), whole, end=num_columns + 1)
        if len(seen):
            cache.begin(len(seen), next(x.device for x in model.parameters() if x.device.type != "meta"))
        rows = cache.rows
        if (asked > seen).any():
            raise ValueError(f"asked holds numbers of more tokens than seen, {seen.tolist()}")
        if rows.text is not None:
            rows.text = _checked_text(tensors.pop("text"), seen, model.memory.passages.max_tokens, vocabulary)
            rows.text = rows.text.to(rows.device)
        rows.seen, rows.asked, cache.num_columns, cache.first_column = seen, asked, num_columns, int(first)
        forms = layer_tensors(_of_one_token(rows, model)) if seen.any() else {}
        if missing := forms.keys() - tensors.keys():
            raise ValueError(f"it lacks the tensor {min(missing)}")
        for name, x in tensors.items():
            if (form := forms.get(re.sub(MARKED, ".", name))) is None:
                raise ValueError(f"it has the tensor {name}, which no layer has")
            shape = [len(seen), *form.shape[1:]]
            if name.partition(".")[2] in KEYS:  # of the tokens read, at most of those that are kept
                layer, read = rows.layers[int(name.partition(".")[0])], int(seen.max())
                shape[-2] = min(read, layer.window - 1 + layer.extra)
            tensors[name] = check_tensor(name, x, shape, (form.dtype, *AUTOCAST)).to(rows.device)
        for i, layer in enumerate(rows.layers) if forms else ():
            own = {x.partition(".")[2]: y for x, y in tensors.items() if x.startswith(f"{i}.")}
            rows.layers[i] = layer.replaced(own) if own else layer
    return cache


def _checked_text(text: Tensor, seen: Tensor, most: int, vocabulary: int) -> Tensor:
    """Returns text (R, N) int32. Raises ValueError unless each row has as many ids at its end as it has seen tokens, or
    `most`, and before them NO_TOKEN.
    """
    held = seen.clamp(max=most)
    check_tensor("text", text, (len(seen), int(held.max()) if len(seen) else 0), (torch.int32,), NO_TOKEN, vocabulary)
    is_token = torch.arange(text.shape[1]) >= text.shape[1] - held[:, None]
    if not (is_token == (text != NO_TOKEN)).all():
        raise ValueError(f"text has other numbers of tokens than {held.tolist()}")
    return text


def memory_fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the facts that a memory depends on: the model's type and sizes, the window, the sink, and the dtypes and
    a hash of the weights.
    """
    config, memory = model.config.get_text_config(decoder=True), model.memory
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    sizes = {name: getattr(config, name, None) for name in names}
    own = {"window": memory.window, "first_token": memory.first_token, "passages": memory.passages is not None}
    return {**sizes, **own, **weight_facts(model, NUMBER)}


def layer_tensors(layers: list) -> dict[str, Tensor]:
    """Returns the tensors of layers by name, such as "0.keys" and "1.start.conv_states.0"."""
    own = [(i, x) for i, x in enumerate(layers) if isinstance(x, RowLayer)]
    return {f"{i}.{name}": x for i, layer in own for name, x in layer.named().items()}


@torch.no_grad()
def _of_one_token(rows: Rows, model: PreTrainedModel) -> list:
    """Returns the layers of a new row that has read one token: their tensors have the form of any row's."""
    one = rows.empty(1, rows.device)
    ids = torch.full((1, 1), model.memory.first_token, device=rows.device)
    model.memory.call(model, ids, one, torch.zeros(1, dtype=torch.int64), 1)
    return one.layers

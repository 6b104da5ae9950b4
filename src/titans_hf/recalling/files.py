"""A `MemoryCache` as a folder: see `cache_files`, which writes, reads and checks it."""

import os
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
from .window import KeyValueLayer, StateLayer

KEYS = ("keys", "values")
STATES = ("conv_states", "recurrent_states")
MARKS = ("start", "earlier")  # states of a recurrent layer as they were before a chunk
NUMBER = 64  # of numbers of each weight that the fingerprint depends on
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
            if (form := forms.get(name.replace(".start.", ".").replace(".earlier.", "."))) is None:
                raise ValueError(f"it has the tensor {name}, which no layer has")
            shape = [len(seen), *form.shape[1:]]
            if name.partition(".")[2] in KEYS:  # of the tokens read, at most of those that are kept
                layer, read = rows.layers[int(name.partition(".")[0])], int(seen.max())
                shape[-2] = min(read, layer.window - 1 + layer.extra)
            tensors[name] = check_tensor(name, x, shape, (form.dtype, *AUTOCAST)).to(rows.device)
        for index, layer in enumerate(rows.layers) if forms else ():
            _fill(layer, {x.removeprefix(f"{index}."): y for x, y in tensors.items() if x.startswith(f"{index}.")})
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
    """Returns the tensors of layers by name, such as "0.keys" and "1.conv_states.0"."""
    found = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, KeyValueLayer) and layer.is_initialized:
            found |= {f"{index}.{name}": getattr(layer, name) for name in KEYS}
        if isinstance(layer, StateLayer):
            groups = {name: getattr(layer, name) for name in STATES}
            for mark in MARKS:
                groups |= {f"{mark}.{name}": x for name, x in zip(STATES, getattr(layer, mark) or (), strict=False)}
            for group, states in groups.items():
                found |= {f"{index}.{group}.{i}": x for i, x in states.items() if x is not None}
    return found


@torch.no_grad()
def _of_one_token(rows: Rows, model: PreTrainedModel) -> list:
    """Returns the layers of a new row that has read one token: their tensors have the form of any row's."""
    one = rows.empty(1, rows.device)
    ids = torch.full((1, 1), model.memory.first_token, device=rows.device)
    model.memory.call(model, ids, one, torch.zeros(1, dtype=torch.int64), 1)
    return one.layers


def _fill(layer, tensors: dict[str, Tensor]) -> None:
    """Gives a new layer the tensors of a file."""
    if isinstance(layer, KeyValueLayer) and KEYS[0] in tensors:
        layer.keys, layer.values = (tensors.pop(x) for x in KEYS)
        layer.is_initialized = True
    if isinstance(layer, StateLayer):
        layer.start, layer.earlier = ({}, {}), ({}, {})
        for i in range(layer.number_of_states):
            for j, group in enumerate(STATES):
                getattr(layer, group)[i] = tensors.pop(f"{group}.{i}", None)
                for mark in MARKS:
                    getattr(layer, mark)[j][i] = tensors.pop(f"{mark}.{group}.{i}", None)
            conv, recurrent = layer.conv_states[i], layer.recurrent_states[i]
            layer.is_conv_states_initialized[i] = conv is not None
            layer.is_recurrent_states_initialized[i] = recurrent is not None
            layer.has_previous_state[i] = conv is not None or recurrent is not None
            if conv is not None:
                layer.conv_kernel_size[i], layer.device, layer.dtype = conv.shape[-1], conv.device, conv.dtype

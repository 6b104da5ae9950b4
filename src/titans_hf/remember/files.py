"""A `MemoryCache` as a folder: see `cache_files`, which writes, reads and checks it."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache_files import AUTOCAST, check_tensor, naming_folder, read_memory, weight_facts, write_memory
from .titans_layer import is_titans
from .window import KeyValueLayer, StateLayer

KEYS = ("keys", "values")
STATES = ("conv_states", "recurrent_states")
MARKS = ("start", "earlier")  # states of a recurrent layer as they were before a chunk
TOKENS = ("ids", "tokens", "contexts", "recent")  # ends of the names of tensors that hold tokens of the model
NUMBER = 64  # of numbers of each weight that the fingerprint depends on


def save(cache: Cache, folder: str | os.PathLike, fingerprint: dict[str, Any]) -> None:
    """Saves a cache, and the `memory_fingerprint` of its model. Rows that have read nothing have no state in the file.

    Raises ValueError or OSError that names the folder, whose memory stays. If another process has saved there since
    this cache was loaded or saved there, this memory goes into a folder beside it, and the error names both.
    """
    tensors = {f"state.{name}": x for name, x in cache.state.items()} | {"seen": cache.seen, "steps": cache.steps}
    tensors["first_column"] = torch.tensor(cache.first_column)
    tensors |= layer_tensors(cache) if cache.seen.any() else {}
    description = {"model": fingerprint, "tokens_seen": cache.seen.tolist(), "about": cache.about}
    counts = {"num_columns": cache.num_columns, "record_past": False}
    write_memory(folder, description, tensors, cache.seen_in_folders, **counts)


def load(cache: Cache, folder: str | os.PathLike, model: PreTrainedModel, fingerprint: dict[str, Any]) -> Cache:
    """Fills a new cache from a folder, for a model with a `memory_fingerprint`.

    Raises FileNotFoundError for a folder without a memory, ValueError that names the folder for a memory of another
    model or a damaged one.
    """
    description, tensors, num_columns, _ = read_memory(folder, fingerprint)
    cache.seen_in_folders[Path(folder).resolve()] = description
    with naming_folder(folder, "loaded"):
        cache.about, whole = dict(description["about"]), (torch.int64,)
        seen = check_tensor("seen", tensors.pop("seen"), (None,), whole, end=2**62)
        steps = check_tensor("steps", tensors.pop("steps"), seen.shape, whole, end=2**62)
        first = check_tensor("first_column", tensors.pop("first_column"), (), whole, end=num_columns + 1)
        if len(seen):
            cache.begin(model, len(seen), next(x.device for x in model.parameters() if x.device.type != "meta"))
        cache.seen, cache.steps, cache.num_columns, cache.first_column = seen, steps, num_columns, int(first)
        of_layers = layer_tensors(_of_one_token(cache, model)) if seen.any() else {}
        forms = {f"state.{name}": x for name, x in cache.state.items()} | of_layers
        if missing := forms.keys() - tensors.keys():
            raise ValueError(f"it lacks the tensor {min(missing)}")
        for name, x in tensors.items():
            if (form := forms.get(name.replace(".start.", ".").replace(".earlier.", "."))) is None:
                raise ValueError(f"it has the tensor {name}, which no layer has")
            _check_like(name, x, form, cache, model)
            tensors[name] = x.to(cache.device)
        cache.state = {name: tensors[f"state.{name}"].to(x.device) for name, x in cache.state.items()}
        for index, layer in enumerate(cache.layers) if of_layers else ():
            _fill(layer, {x.removeprefix(f"{index}."): y for x, y in tensors.items() if x.startswith(f"{index}.")})
    return cache


def memory_fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the facts that a memory depends on: the model's type and sizes, a hash of its memory's parameters, and
    the dtypes and a hash of its weights.
    """
    config, memory = model.config.get_text_config(decoder=True), model.memory
    total, parts = hashlib.sha256(), {}
    if memory.fast_weights is not None:
        fast = memory.fast_weights
        parts |= {f"A.{x}": y for x, y in fast.directions.items()} | {f"B.{x}": y for x, y in fast.start.items()}
        total.update(f"{sorted(fast.rates.items())} {fast.step}".encode())
    if (chosen := memory.token_list) is not None:
        parts |= {"center": chosen.center, "projection": chosen.projection}
        total.update(f"{chosen.entries} {chosen.threshold}".encode())
    for name, x in sorted(parts.items()):
        total.update(f"{name} {tuple(x.shape)}".encode() + x.detach().cpu().float().contiguous().numpy().tobytes())
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    sizes = {name: getattr(config, name, None) for name in names}
    own = {"window": memory.window, "first_token": memory.first_token, "memory": total.hexdigest()}
    return {**sizes, **own, **weight_facts(model, NUMBER)}


def layer_tensors(cache: Cache) -> dict[str, Tensor]:
    """Returns the tensors of a cache's layers by name, such as "0.keys" and "1.conv_states.0"."""
    found = {}
    for index, layer in enumerate(cache.layers):
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
def _of_one_token(cache: Cache, model: PreTrainedModel) -> Cache:
    """Returns a cache that has read one token without the memory, whose tensors have the form of any cache's; `cache`
    itself if it has read none, and its layers have a state.
    """
    if is_titans(model):
        return cache
    empty, ids = type(cache)(model), torch.full((1, 1), model.memory.first_token, device=cache.device)
    model.memory.call(model, ids, empty, torch.zeros(1, dtype=torch.int64))
    return empty


def _check_like(name: str, x: Tensor, form: Tensor, cache: Cache, model: PreTrainedModel) -> None:
    """Raises ValueError unless a tensor fits `form`, the tensor of a cache that has read one token or none."""
    index, _, own = name.partition(".")
    shape: list[int | None] = [len(cache.seen), *form.shape[1:]]
    if index == "state":
        shape[1:2] = [None if n == 0 else n for n in shape[1:2]]  # it grows
        is_token = name.rpartition(".")[2] in TOKENS
        end = model.get_input_embeddings().weight.shape[0] if is_token else None
        check_tensor(name, x, shape, (form.dtype,), -1 if x.dtype == torch.int32 else 0, end)
        return
    if own in KEYS:  # of the tokens read, at most of those that are kept
        layer, read = cache.layers[int(index)], int(cache.seen.max())
        shape[-2] = read if layer.window is None else min(read, layer.window - 1 + layer.extra)
    check_tensor(name, x, shape, (form.dtype, *AUTOCAST))


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

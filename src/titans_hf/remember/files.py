"""A `MemoryCache` as a folder: see `cache_files`, which writes and reads it."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache_files import SavedMemory, naming_folder, read_memory, write_memory
from .window import KeyValueLayer, StateLayer

KEYS = ("keys", "values")
TOKENS = ("chunk.ids", "list.tokens", "list.contexts", "list.recent")  # tensors that hold tokens of the model
STATES = ("conv_states", "recurrent_states")


def save(cache: Cache, folder: str | os.PathLike, facts: dict[str, Any]) -> None:
    """Saves a cache, and the `fingerprint` of its model.

    Raises ValueError or OSError that names the folder, whose memory stays. If another process has saved there since
    this cache was loaded or saved there, this memory goes into a folder beside it, and the error names both.
    """
    tensors = {f"state.{name}": x for name, x in cache.state.items()} | {"seen": cache.seen, "steps": cache.steps}
    tensors["columns"] = torch.tensor([cache.num_columns, cache.first_column])
    tensors |= layer_tensors(cache)
    description = {"model": facts, "tokens_seen": cache.seen.tolist(), "about": cache.about}
    write_memory(folder, SavedMemory(description, tensors, cache.num_columns, False), cache.seen_in_folders)


def load(cache: Cache, folder: str | os.PathLike, model: PreTrainedModel, facts: dict[str, Any]) -> Cache:
    """Fills a new cache from a folder, for a model with the fingerprint `facts`.

    Raises FileNotFoundError for a folder without a memory, ValueError that names the folder for a memory of another
    model or a damaged one.
    """
    saved = read_memory(folder, facts)
    cache.seen_in_folders[Path(folder).resolve()] = saved.description
    with naming_folder(folder, "loaded"):
        cache.about = dict(saved.description["about"])
        tensors = dict(saved.tensors)
        device = next(x.device for x in model.parameters() if x.device.type != "meta")
        columns, cache.seen, cache.steps = (tensors.pop(x) for x in ("columns", "seen", "steps"))
        cache.num_columns, cache.first_column = columns.tolist()
        rows, size = len(cache.seen), model.get_input_embeddings().weight.shape[0]
        _check_range("seen", cache.seen, 0, 2**62)
        _check("steps", cache.steps, cache.seen.shape, (torch.int64,))
        cache.device, cache.state = device, model.memory.initial_state(model, rows, device) if rows else {}
        for name, x in cache.state.items():
            new = tensors.pop(f"state.{name}")
            _check(f"state.{name}", new, x.shape, (x.dtype,))
            if name in TOKENS:
                _check_range(name, new, -1 if x.dtype == torch.int32 else 0, size)
            cache.state[name] = new.to(device)
        forms = layer_tensors(_of_one_token(cache, model)) if rows and int(cache.seen.max()) else {}
        if missing := forms.keys() - tensors.keys():
            raise ValueError(f"it lacks the tensor {min(missing)}")
        for index, layer in enumerate(cache.layers):
            own = {x: tensors.pop(x) for x in [*tensors] if x.startswith(f"{index}.")}
            for name, x in own.items():
                _check_like(name, x, forms[name.replace(".start.", ".")], layer, cache.seen)
            _fill(layer, {x.removeprefix(f"{index}."): y.to(device) for x, y in own.items()})
        if tensors:
            raise ValueError(f"it has the tensor {min(tensors)}, which no layer has")
    return cache


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the facts that a memory depends on: the model's type and sizes, a hash of some of its weights, and a hash
    of its memory's parameters.
    """
    config, memory = model.config.get_text_config(decoder=True), model.memory
    total, parts = hashlib.sha256(), []
    if memory.fast_weights is not None:
        fast = memory.fast_weights
        parts = [(f"A.{x}", y) for x, y in fast.directions.items()] + [(f"B.{x}", y) for x, y in fast.start.items()]
        total.update(f"{fast.rates} {fast.step}".encode())
    if memory.token_list is not None:
        chosen = memory.token_list
        parts += [("center", chosen.center), ("projection", chosen.projection)]
        total.update(f"{chosen.entries} {chosen.threshold}".encode())
    for name, x in sorted(parts, key=lambda part: part[0]):
        total.update(f"{name} {tuple(x.shape)}".encode() + x.detach().cpu().float().contiguous().numpy().tobytes())
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    sizes = {name: getattr(config, name, None) for name in names}
    own = {"window": memory.window, "first_token": memory.first_token, "memory": total.hexdigest()}
    return {**sizes, **own, "weights": digest_of_weights(model)}


def digest_of_weights(model: PreTrainedModel) -> str:
    """Returns a hash of some of a model's weights."""
    some = hashlib.sha256()
    for x in model.parameters():
        if not x.is_meta and x.is_floating_point() and not hasattr(x, "__tensor_flatten__"):
            some.update(x.detach().flatten()[:64].cpu().float().numpy().tobytes())
    return some.hexdigest()


def layer_tensors(cache: Cache) -> dict[str, Tensor]:
    """Returns the tensors of a cache's layers by name, such as "0.keys" and "1.conv_states.0"."""
    found = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, KeyValueLayer) and layer.is_initialized:
            found |= {f"{index}.{name}": getattr(layer, name) for name in KEYS}
        if isinstance(layer, StateLayer):
            groups = {name: getattr(layer, name) for name in STATES}
            if layer.start is not None:
                groups |= {f"start.{name}": x for name, x in zip(STATES, layer.start, strict=True)}
            for group, states in groups.items():
                found |= {f"{index}.{group}.{i}": x for i, x in states.items() if x is not None}
    return found


@torch.no_grad()
def _of_one_token(cache: Cache, model: PreTrainedModel) -> Cache:
    """Returns a cache that has read one token: the form of any cache's tensors."""
    new = type(cache)(model)
    model(input_ids=torch.full((1, 1), model.memory.first_token, device=cache.device), cache=new)
    return new


def _check_like(name: str, x: Tensor, form: Tensor, layer, seen: Tensor) -> None:
    """Raises ValueError unless a layer's tensor fits `form`, the tensor after one token of one row."""
    wanted = [len(seen), *form.shape[1:]]
    if name.endswith(KEYS):  # at least the tokens read, at most the tokens kept
        most = int(seen.max()) if layer.window is None else layer.window - 1 + layer.extra
        wanted[-2] = min(max(x.shape[-2] if x.dim() == 4 else 0, min(most, int(seen.max()))), most)
    _check(name, x, torch.Size(wanted), (form.dtype, torch.bfloat16, torch.float16))  # the dtype of a call's autocast


def _fill(layer, tensors: dict[str, Tensor]) -> None:
    """Gives a new layer the tensors of a file."""
    if isinstance(layer, KeyValueLayer) and KEYS[0] in tensors:
        layer.keys, layer.values = (tensors.pop(x) for x in KEYS)
        layer.is_initialized = True
    if isinstance(layer, StateLayer):
        start: tuple[dict, dict] = ({}, {})
        for i in range(layer.number_of_states):
            for group, of_start in zip(STATES, start, strict=True):
                getattr(layer, group)[i] = tensors.pop(f"{group}.{i}", None)
                of_start[i] = tensors.pop(f"start.{group}.{i}", None)
            conv, recurrent = layer.conv_states[i], layer.recurrent_states[i]
            layer.is_conv_states_initialized[i] = conv is not None
            layer.is_recurrent_states_initialized[i] = recurrent is not None
            layer.has_previous_state[i] = conv is not None or recurrent is not None
            if conv is not None:
                layer.conv_kernel_size[i], layer.device, layer.dtype = conv.shape[-1], conv.device, conv.dtype
        layer.start = start
    if tensors:
        raise ValueError(f"it has the tensor {min(tensors)}, which its layer does not have")


def _check(name: str, x: Tensor, shape: torch.Size, dtypes: tuple[torch.dtype, ...]) -> None:
    if x.shape != shape or x.dtype not in dtypes:
        raise ValueError(f"{name} has the shape {tuple(x.shape)} and the dtype {x.dtype}, not {tuple(shape)}")
    if x.is_floating_point() and not x.isfinite().all():
        raise ValueError(f"{name} holds numbers that are not finite")


def _check_range(name: str, x: Tensor, least: int, end: int) -> None:
    if x.numel() and not least <= x.min() <= x.max() < end:
        raise ValueError(f"{name} holds numbers from {x.min()} to {x.max()}, not from {least} to below {end}")

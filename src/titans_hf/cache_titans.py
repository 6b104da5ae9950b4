"""The cache of a Titans model: the state of every layer between calls, of limited size for any context length."""

import copy
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .cache_files import TensorReader, naming_folder, read_memory, write_memory
from .cache_files import model_fingerprint as fingerprint_of
from .cache_layer import RecordedColumns, TitansCacheLayer
from .configuration_titans import TitansConfig, field_facts


class TitansCache(Cache):
    """The state of a Titans model between calls: memory weights, and momentum if there is one, window or segment, and
    convolution inputs.

    `generate()` and `model(..., use_cache=True)` create one; pass it back as `cache` to continue. Its size depends on
    the model and the batch size, and on the number of tokens read only until the window is full. A cache is valid only
    for the weights it was made with: forward() checks only the config, `from_pretrained` the weights too.

    ```python
    cache = TitansCache(model.config)
    with torch.no_grad():  # else the cache keeps the autograd graph of everything it has read
        model(first_part, cache=cache)
        model(second_part, cache=cache)  # as if both parts had been one sequence
    ```

    Args:
        config: the model's configuration.
        compileable: let `generate()` compile the decoding step, once for any number of tokens read. The number of
            columns is then a tensor.

    Attributes:
        about: a description for people, a dictionary that JSON can represent; saved with the memory.
        learning: whether calls update the memory; None: as the model's `set_memory_learning` says.
    """

    learning: bool | None = None

    def __init__(self, config: TitansConfig, *, compileable: bool = False):
        super().__init__(layers=[TitansCacheLayer(compileable) for _ in range(config.num_hidden_layers)])
        self.made_for = _shaping_fields(config)
        self.about: dict[str, Any] = {}
        self.is_guarded = False  # by `undone_on_error`
        # By folder, the description of the memory that was last loaded from it or saved to it: for `write_memory`.
        self.seen_in_folders: dict[Path, dict[str, Any] | None] = {}

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first token."""
        return self.layers[0].batch_size  # the base class hashes the sizes of all layers, which may be symbolic

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = {id(x): x for layer in self.layers for x in layer.tensors()}
        return sum(x.numel() * x.element_size() for x in tensors.values())

    @property
    def num_tokens_seen(self) -> Tensor | None:
        """Number of tokens that each row has read of its current document, (B,) int64, padding excluded; None before
        the first. Columns kept by crop() count once they have been read again.
        """
        state = self.layers[0].state
        return None if state is None else state.memory.num_seen

    def memory_weights(self, layer: int) -> tuple[Tensor, ...]:
        """Returns the weights of the memory in a layer: (B, H, d_in, d_out) of each layer of its network that learns.

        Empty before the first token. Reading on replaces the tensors: returned tensors do not change. Columns kept by
        crop() count once they have been read again. A row that has been reset has zeros until its next token.

        Args:
            layer: index of the decoder layer.
        """
        state = self.layers[layer].state
        return () if state is None else state.memory.weights

    def memory_momentum(self, layer: int) -> tuple[Tensor, ...]:
        """Returns the momentum of the weights that `memory_weights` returns; empty without momentum."""
        state = self.layers[layer].state
        return () if state is None else state.memory.momentum

    def __repr__(self) -> str:
        if self.batch_size == -1:
            read = "nothing read yet"
        else:
            counts = [0] * self.batch_size if self.num_tokens_seen is None else self.num_tokens_seen.tolist()
            shown = ", ".join(f"{n:,}" for n in counts[:8]) + (", ..." if len(counts) > 8 else "")
            read = f"tokens read by {len(counts)} row{'s'[: len(counts) > 1]}: {shown}; {self.num_bytes:,} bytes"
        return f"TitansCache: {read}\nmemories of {len(self.layers)} layers"

    def columns_to_reread(self) -> RecordedColumns | None:
        """Returns the columns kept by crop(), to be read again on the next call; None if there are none."""
        return self.layers[0].to_reread

    def rows_to_restart(self) -> Tensor | None:
        """Returns (B,) bool, True in rows that have been reset since the last call; None if there are none."""
        return self.layers[0].restart

    def reset(self, rows: Tensor | None = None) -> None:
        """Resets the cache, or the rows where `rows` (B,) bool is True: their states are erased, and their next token
        starts from the learned initial memory.

        Raises ValueError for `rows` of another length, and RuntimeError for `rows` of a cache that records.
        """
        if rows is not None:
            if self.batch_size not in (-1, len(rows)):  # a single entry would reset all rows
                raise ValueError(f"`rows` must have one entry per row ({self.batch_size}), but has {len(rows)}.")
            if not rows.any():
                return
            self._check_not_recording("reset(rows)")
        for layer in self.layers:
            layer.reset(rows)

    def start_prompt(self, num_read: int = 0) -> None:
        """Sets the number of columns read to `num_read`: `generate()` then expects a prompt that begins with the last
        `num_read` tokens read. With 0, the prompt has only the tokens to read next.

        Without this call, `generate()` expects all ids since the cache was created, or a mask for them. Raises
        RuntimeError for a cache that records.
        """
        self._check_not_recording("start_prompt()")
        for layer in self.layers:
            layer.set_num_columns(num_read)

    def append_rows(self, other: "TitansCache") -> None:
        """Appends the rows of another cache of the same model. The number of columns stays this cache's.

        Both caches must have read something. Raises RuntimeError if one of them records, or has columns to read again.
        """
        for cache in (self, other):
            cache._check_not_recording("append_rows()")
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            ours.append_rows(theirs)

    def _check_not_recording(self, call: str) -> None:
        if any(layer.record_past for layer in self.layers):
            raise RuntimeError(f"{call} cannot be undone by crop(): call stop_past_recording() first.")

    def stop_past_recording(self) -> None:
        """Ends the recording that `activate_past_recording()` began, so that the cache has a constant size again. The
        memory keeps everything that was read.

        Raises RuntimeError between a crop() and the next token.
        """
        for layer in self.layers:
            layer.stop_past_recording()

    def __copy__(self) -> "TitansCache":
        """Returns a branch that shares the state so far: both continue without affecting each other."""
        branch = object.__new__(type(self))
        branch.__dict__ |= vars(self) | {"layers": [copy.copy(x) for x in self.layers]}
        branch.about, branch.seen_in_folders = dict(self.about), dict(self.seen_in_folders)
        return branch

    def merge(self, other: "TitansCache", weight: float = 0.5) -> None:
        """Merges the memory of another cache of the same model into this one: (1 - weight) ours + weight theirs.

        Key-value cache, convolution inputs and number of columns stay as they are in this cache. For the mean of n
        memories, merge with weights 1/2, 1/3, ..., 1/n. `other` has as many rows as this cache, or one row, which is
        merged into every row.

        Raises ValueError for a weight outside of 0 to 1, for caches of different models, and for a cache that has read
        nothing, has reset rows or has columns to read again; RuntimeError for a cache that records.
        """
        # The mean keeps the content of each memory. A sum of their changes fails far from the trained length.
        if not 0 <= weight <= 1:
            raise ValueError(f"`weight` must be from 0 to 1, but is {weight}.")
        check_cache_class("other", other)
        for name, cache in {"this cache": self, "`other`": other}.items():
            if cache.batch_size == -1:
                raise ValueError(f"A cache cannot be merged: {name} has read nothing.")
            if cache.rows_to_restart() is not None:
                raise ValueError(f"A cache cannot be merged: {name} has read nothing since rows were reset.")
            if cache.columns_to_reread() is not None:
                raise ValueError(f"A cache cannot be merged: {name} has columns to read again.")
        _check_equal("`other` must be a cache of the same model, but", other.made_for, self.made_for)
        self._check_not_recording("merge()")
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            ours.state = ours.state.merged(theirs.state, weight)

    def detach(self) -> "TitansCache":
        """Detaches the state from the autograd graph, in place (truncated backpropagation through time)."""
        for layer in self.layers:
            layer.apply(Tensor.detach)
        return self

    def save_pretrained(
        self, folder: str | os.PathLike, model: PreTrainedModel, *, model_fingerprint: dict[str, Any] | None = None
    ) -> None:
        """Writes `memory.json` and a safetensors file, replacing the memory in the folder atomically: an interrupted
        save leaves the old one. The memory can be loaded only for `model`, with the weights it has now.

        If another process has saved into the folder since this cache was loaded from it or saved to it, that memory
        stays. This memory goes into a new folder beside it, and an error names both.

        The file contains the text that was read: treat it like the text itself. Raises ValueError for the cache of
        another model, for a model that is sharded, and for numbers that are not finite; ValueError or
        OSError, naming the folder, for any failure while it is written.

        Args:
            model_fingerprint: `cache_files.model_fingerprint(model)`, if the model has not changed since. Else a hash
                of all weights is computed.
        """
        model = base_model(model)
        self.check_fits(model.config, self.batch_size)
        layers = [layer.named_tensors() for layer in self.layers]
        tensors = {f"{i}.{path}": x for i, layer in enumerate(layers) for path, x in layer.items()}
        num_seen = self.num_tokens_seen
        tokens_seen = [] if num_seen is None else num_seen.tolist()
        facts = model_fingerprint or fingerprint_of(model)
        description = {"model": facts, "tokens_seen": tokens_seen, "about": self.about}
        counts = {"num_columns": int(self.layers[0].num_columns), "record_past": self.layers[0].record_past}
        write_memory(folder, description, tensors, self.seen_in_folders, **counts)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike,
        model: PreTrainedModel,
        *,
        model_fingerprint: dict[str, Any] | None = None,
        **options,
    ) -> "TitansCache":
        """Loads the memory of a folder, bit for bit, for the model that created it. The file is memory-mapped.
        `options` are the keyword arguments of the class; `model_fingerprint` as in `save_pretrained`.

        Raises FileNotFoundError for a folder without a memory; otherwise ValueError or OSError, naming the folder and
        the difference, for the memory of a model with another config, dtype or weights, for a file that was truncated
        or altered, for tensors that no cache of the model has, and for another format.
        """
        model = base_model(model)
        facts = model_fingerprint or fingerprint_of(model)
        description, tensors, num_columns, record_past = read_memory(folder, facts)
        cache = cls(model.config, **options)
        with naming_folder(folder, "loaded"):
            cache.about = dict(description["about"])
            reader = TensorReader(tensors, model.config)
            for i, (layer, decoder_layer) in enumerate(zip(cache.layers, model.base_model.layers, strict=True)):
                mixer = decoder_layer.mixer
                parameter = next(mixer.parameters())
                with torch.no_grad():
                    like = mixer.initial_state(1, parameter.dtype)
                layer.restore(partial(reader.take, i), like, parameter.new_zeros(1, 0, model.config.hidden_size))
                layer.record_past, layer.is_initialized = record_past, num_columns > 0
                layer.set_num_columns(num_columns)
                layer.apply(methodcaller("to", parameter.device))
            reader.finish()
        cache.seen_in_folders[Path(folder).resolve()] = description
        return cache

    def check_fits(self, config: TitansConfig, batch_size: int) -> None:
        """Raises ValueError, naming the difference, for another config or batch size than the cache was made for."""
        _check_equal("`cache` does not fit the model:", self.made_for, _shaping_fields(config))
        if self.batch_size not in (-1, batch_size):
            advice = f"; `batch_repeat_interleave({batch_size})` repeats a copy's row" if self.batch_size == 1 else ""
            sizes = f"its batch size is {self.batch_size}, not {batch_size}"
            raise ValueError(f"`cache` does not fit the input: {sizes}{advice}.")


def undone_on_error(cache: TitansCache | None) -> AbstractContextManager:
    """Returns a context that leaves the cache as it was if the block raises, even between two layers. Without a cache,
    and in a compiled call, it does nothing.
    """
    compiling = torch.compiler.is_compiling()
    return _undone_on_error(cache) if isinstance(cache, TitansCache) and not compiling else nullcontext()


@contextmanager
def _undone_on_error(cache: TitansCache) -> Iterator[None]:
    if cache.is_guarded:  # by the head around this model: once per call
        yield
        return
    before, cache.is_guarded = [dict(vars(layer)) for layer in cache.layers], True
    try:
        yield
    except BaseException:
        for layer, attributes in zip(cache.layers, before, strict=True):
            vars(layer).clear()
            vars(layer).update(attributes)
        raise
    finally:
        cache.is_guarded = False


def check_cache_class(name: str, cache: TitansCache) -> None:
    """Raises ValueError, naming the argument, for a cache of another class, even one of the same name that a checkpoint
    brought in its own code.
    """
    if not isinstance(cache, TitansCache):
        raise ValueError(
            f"`{name}` must be a TitansCache of {TitansCache.__module__}, the model's own code, but is a "
            f"{type(cache).__name__} of {type(cache).__module__}: `model.cache_class` is the class that fits."
        )


def _check_equal(problem: str, fields: dict, expected: dict) -> None:
    """Raises ValueError that begins with `problem` and names the first field that differs."""
    for name, value in fields.items():
        if value != expected.get(name):
            raise ValueError(f"{problem} its {name} is {value}, not {expected.get(name)}.")


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """Returns the model inside of PEFT's model; any other model itself."""
    return getattr(model, "get_base_model", lambda: model)()


# The fields that determine state shapes and chunk boundaries, by variant: outside of calls, which may be compiled.
_OF_SHAPE = {name: x["variants"] for name, x in field_facts(TitansConfig).items() if x["state"] == "shape"}


def _shaping_fields(config: TitansConfig) -> dict:
    """Returns the config fields on which state shapes and chunk boundaries depend."""
    return {name: getattr(config, name) for name, variants in _OF_SHAPE.items() if config.variant in variants}


__all__ = ["TitansCache", "TitansCacheLayer"]

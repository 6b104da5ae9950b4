"""The cache of a Titans model: what it has learned and last seen, of one size however much it has read."""

import copy
import os
import tempfile
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration_titans import TitansConfig
from .layer_state import LayerState, Span, as_tree, named_tensors
from .memory_files import LOCK, SavedMemory, check_tensors, fingerprint, read_memory, write_memory
from .token_grid import Columns


class TitansCacheLayer(CacheLayerMixin):
    """One layer's `LayerState`, None before the first token. States are replaced, never written into: earlier ones, and
    the graph of a training step, stay intact.

    While `record_past`, `recorded` holds what was read since the last `crop`. After `crop(-k)`, `state` is the one
    before that, and `unread` what is left of it: the next call reads it again before its own tokens. `restart` (B,)
    marks rows that have been reset, whose next column begins a new document.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, compileable: bool = False):
        super().__init__()
        self.is_compileable = compileable
        self.state: LayerState | None = None
        self.num_columns = 0
        self.record_past = False
        self.recorded: Span | None = None
        self.unread: Span | None = None
        self.restart: Tensor | None = None

    def advance(self, before: LayerState | None, after: LayerState, inputs: Tensor, columns: Columns) -> None:
        """Takes the state after a call, padding included, that read `inputs` (B, T, hidden) from the state `before`."""
        if self.record_past:
            recorded = Span.empty(before, inputs) if self.recorded is None else self.recorded
            self.recorded = recorded.append(inputs, columns)
        self.state, self.unread, self.restart = after, None, None
        self.num_columns += inputs.shape[1]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("A Titans layer makes its state itself, from learned weights, at the first token.")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(
            "A TitansCache takes whole layer states, not keys and values: use it with a Titans model."
        )

    def get_seq_length(self) -> int:
        return self.num_columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        """-1 before the first token."""
        if self.state is not None:
            return self.state.conv.shape[0]
        return -1 if self.unread is None else self.unread.inputs.shape[0]

    def tensors(self) -> list[Tensor]:
        """All that the layer holds."""
        return list(self.named_tensors().values())

    def named_tensors(self) -> dict[str, Tensor]:
        parts = {name: getattr(self, name) for name in ("state", "recorded", "unread", "restart")}
        return {path: x for name, part in parts.items() for path, x in named_tensors(part, name)}

    def restore(self, tree: dict[str, Any], num_columns: int, record_past: bool) -> None:
        """Takes what `named_tensors` returned, `as_tree`."""
        self.state = LayerState.of_tree(tree["state"]) if "state" in tree else None
        self.recorded, self.unread = (Span.of_tree(tree[x]) if x in tree else None for x in ("recorded", "unread"))
        self.restart = tree.get("restart")
        self.num_columns, self.record_past = num_columns, record_past
        self.is_initialized = num_columns > 0

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        for part in ("state", "recorded", "unread"):
            held = getattr(self, part)
            setattr(self, part, None if held is None else held.map(fn))
        self.restart = None if self.restart is None else fn(self.restart)

    def reset(self, rows: Tensor | None = None) -> None:
        """Forgets everything, or what `rows` (B,) bool have read: their next token starts from the learned initial
        memory. Raises RuntimeError for some rows of a layer that records."""
        if rows is None:
            self.state, self.recorded, self.unread, self.restart = (None,) * 4
            self.num_columns, self.is_initialized = 0, False
        elif self.record_past:
            raise RuntimeError("reset(rows) cannot be taken back by crop(): reset all rows, or stop recording.")
        elif self.state is not None:
            self.restart = rows if self.restart is None else self.restart | rows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size == 1:  # nothing is written into: rows share a state until they read on
            self._map(lambda x: x.expand(repeats, *x.shape[1:]))
        else:
            self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        if held := self.tensors():
            self.device = held[0].device
            self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if hasattr(self, "device"):
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def activate_past_recording(self) -> None:
        """From now on keeps what it takes to `crop` the columns that are read, until the next `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last columns, `tokens_to_remove` being their number, negative; 0 accepts all that was read.

        Raises RuntimeError for columns that were not recorded: what a memory has learned cannot be unlearned.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative, as in crop(-3), but is {tokens_to_remove}.")
        span = self.recorded if self.unread is None else self.unread
        kept = tokens_to_remove + (0 if span is None else span.num_columns)
        if tokens_to_remove and kept < 0:
            raise RuntimeError(
                f"crop({tokens_to_remove}) goes back beyond the {kept - tokens_to_remove} columns recorded since the "
                "last crop. Call activate_past_recording() before reading what may have to be taken back, or read with "
                "a copy (copy.deepcopy)."
            )
        if tokens_to_remove:
            self.state, self.unread = span.state, span.first(kept) if kept else None
            self.num_columns += tokens_to_remove
            self.is_initialized = self.num_columns > 0
        self.recorded = None


class TitansCache(Cache):
    """The state of a Titans model between calls: memory weights and momentum, window or segment, convolution inputs.

    `generate()` and `model(..., use_cache=True)` make one by themselves; pass it back as `past_key_values` to read on.
    Its size depends on the model and the batch alone, not on the tokens read.

    ```python
    cache = TitansCache(model.config)
    model(first_part, past_key_values=cache)
    model(second_part, past_key_values=cache)  # as if both parts had been one sequence
    ```

    offloading: keep the state of a layer on the CPU except while the layer is at work.
    compileable: let `generate()` compile the decoding step.

    `about` is what a person wants to know of the memory, as JSON takes it: it is saved with it.
    """

    def __init__(self, config: TitansConfig, *, offloading: bool = False, compileable: bool = False):
        super().__init__(layers=[TitansCacheLayer(compileable) for _ in range(config.num_hidden_layers)])
        self.offloading = offloading  # not the base class's: that one follows update(), which states never go through
        self.made_for = _shaping_fields(config)
        self.about: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        held = {id(x): x for layer in self.layers for x in layer.tensors()}
        return sum(x.numel() * x.element_size() for x in held.values())

    def reset(self, rows: Tensor | None = None) -> None:
        """Forgets everything, or what `rows` (B,) bool have read: their next token starts from the learned initial
        memory."""
        for layer in self.layers:
            layer.reset(rows)

    def start_prompt(self) -> None:
        """Columns are counted from here, so that `generate()` takes a prompt that has only what is to be read next.

        Otherwise it needs all ids since the cache was made, or a mask for them. Raises RuntimeError for a cache that
        records, whose columns may have to be taken back.
        """
        if any(layer.record_past or layer.unread is not None for layer in self.layers):
            raise RuntimeError("start_prompt() cannot be taken back by crop(): make a copy that does not record.")
        for layer in self.layers:
            layer.num_columns = 0

    def __copy__(self) -> "TitansCache":
        """A branch, which shares what has been read: both read on without disturbing each other."""
        branch = object.__new__(type(self))
        branch.__dict__ |= vars(self) | {"layers": [copy.copy(x) for x in self.layers], "about": dict(self.about)}
        return branch

    def merge(self, other: "TitansCache", weight: float = 0.5) -> None:
        """Takes in what another cache of the same model has learned: memories become (1 - weight) ours + weight theirs.

        What was last seen (window, segment, convolution inputs, columns) stays ours. Means of memories keep what each
        of them holds (docs/results.md): for the mean of n of them, merge with weights 1/2, 1/3, ..., 1/n. `other` has
        as many rows, or one for all.

        Raises ValueError for a weight that is not from 0 to 1, and for caches that do not fit each other, have read
        nothing or have columns to read again; RuntimeError for one that records.
        """
        if not 0 <= weight <= 1:
            raise ValueError(f"`weight` must be from 0 to 1, but is {weight}.")
        if other.made_for != self.made_for or other.batch_size not in (1, self.batch_size):
            raise ValueError("`other` is not a cache of the same model, with as many rows or one.")
        if any(layer.record_past for layer in self.layers):
            raise RuntimeError("merge() cannot be taken back by crop(): make a copy that does not record.")
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            if None in (ours.state, theirs.state) or ours.unread is not None or theirs.unread is not None:
                raise ValueError("Caches that have read nothing, or have columns to read again, cannot be merged.")
            ours.state = ours.state.merged(theirs.state, weight)

    def detach(self) -> "TitansCache":
        """Cuts the cache from the graph that made it, in place (truncated backpropagation through time)."""
        for layer in self.layers:
            layer._map(Tensor.detach)
        return self

    def save_pretrained(self, folder: str | os.PathLike, model: PreTrainedModel) -> None:
        """Writes `memory.json` and a safetensors file, in place of the memory that the folder holds: at once, so that
        whoever interrupts it finds the old one. It belongs to `model`, which has read, with the weights it has now.

        The file contains what was read: treat it like the text itself. Raises ValueError for a cache that is not the
        model's, and a model that is sharded or offloaded.
        """
        self.check_fits(model.config, self.batch_size)
        layers = [layer.named_tensors() for layer in self.layers]
        tensors = {f"{i}.{path}": x for i, layer in enumerate(layers) for path, x in layer.items()}
        num_seen = tensors.get("0.state.memory.num_seen")
        tokens_seen = [] if num_seen is None else num_seen.tolist()
        description = {"model": fingerprint(model), "tokens_seen": tokens_seen, "about": self.about}
        check_tensors(tensors, model)
        first = self.layers[0]
        write_memory(folder, SavedMemory(description, tensors, first.num_columns, first.record_past))

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike, model: PreTrainedModel, **options) -> "TitansCache":
        """The memory of a folder, bit for bit, for the model that made it. The file is mapped: what is not used takes
        no memory. `options` are those of the class.

        Raises FileNotFoundError where there is none, and ValueError, naming what differs, for the memory of a model
        with another config, dtype or weights, for a file that was cut or altered, and for a newer format.
        """
        saved = read_memory(folder, model)
        cache = cls(model.config, **options)
        cache.about = saved.description["about"]
        tree = as_tree(saved.tensors)
        for i, (layer, decoder) in enumerate(zip(cache.layers, model.base_model.layers, strict=True)):
            layer.restore(tree.get(str(i), {}), saved.num_columns, saved.record_past)
            layer._map(methodcaller("to", next(decoder.parameters()).device))
        return cache

    def push_to_hub(self, repo_id: str, model: PreTrainedModel, *, private: bool = True, **kwargs) -> CommitInfo:
        """Uploads what `save_pretrained` writes; to a private repository, because a memory contains what was read.

        kwargs: those of `HfApi.upload_folder`, as `token`, `revision` and `commit_message`.
        """
        api = HfApi(token=kwargs.pop("token", None))
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, model)
            Path(folder, LOCK).unlink(missing_ok=True)
            return api.upload_folder(repo_id=repo_id, folder_path=folder, **kwargs)

    def check_fits(self, config: TitansConfig, batch_size: int) -> None:
        """Raises ValueError, saying what differs, unless this is a cache of such a model for such a batch."""
        ours, theirs = self.made_for, _shaping_fields(config)
        if self.batch_size != -1:
            ours, theirs = ours | {"batch size": self.batch_size}, theirs | {"batch size": batch_size}
        for name, value in ours.items():
            if value != theirs.get(name):
                raise ValueError(
                    f"`past_key_values` does not fit the model and its input: its {name} is {value}, "
                    f"not {theirs.get(name)}."
                )


def _shaping_fields(config: TitansConfig) -> dict:
    """The fields of a config that say what its states look like and when they change."""
    names = ["variant", "num_hidden_layers", "hidden_size", "memory_num_heads", "memory_depth", "memory_expansion"]
    names += ["memory_chunk_size", "memory_conv_kernel"]
    if config.variant != "lmm":
        names += ["num_persistent_tokens", "num_key_value_heads", "head_dim"]
        names += ["segment_length"] if config.variant == "mac" else ["sliding_window"]
    return {name: getattr(config, name) for name in names}


__all__ = ["TitansCache", "TitansCacheLayer"]

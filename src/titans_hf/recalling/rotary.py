"""Rotary frequencies that depend on the length of a call: with a window they are those of a short text.

Transformers' "longrope" and "dynamic" scalings choose the frequencies of all rows of a call by its largest position. A
row's logits would depend on the texts beside it, and keys of earlier calls would have other frequencies than the
queries of later ones. Behind a window no query sees further than a short text is long, so that a short text's
frequencies fit any position.
"""

from typing import Any  # PyTorch declares every attribute of a module as a tensor or module

from transformers import PreTrainedModel


def scaled_modules(model: PreTrainedModel) -> list[tuple[Any, dict[str, str]]]:
    """Returns the modules whose frequencies depend on the length, and their scalings by the prefix of their buffers."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = {f"{name}_": x for name, x in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
        kinds = {name: x for name, x in kinds.items() if x is not None and ("dynamic" in x or x == "longrope")}
        if kinds:
            found.append((module, kinds))
    return found


def check_window(model: PreTrainedModel, window: int) -> None:
    """Raises ValueError for a window beyond which the frequencies of a model are others."""
    for module, kinds in scaled_modules(model):
        for prefix, kind in kinds.items():
            own = module.config.rope_parameters
            own = own[prefix.removesuffix("_")] if prefix else own
            most = own["original_max_position_embeddings"] if kind == "longrope" else module.original_max_seq_len
            if window > most:
                raise ValueError(
                    f"`window` must be at most {most} for {type(model).__name__}, whose rotary frequencies depend on "
                    f"the length of a text beyond that (rope_type {kind!r}), got {window}."
                )


def fix_frequencies(model: PreTrainedModel) -> list[tuple[Any, object]]:
    """Lets the frequencies of a model be those of a short text, and returns what `free_frequencies` needs."""
    before = []
    for module, kinds in scaled_modules(model):
        before.append((module, module.rope_type))
        for prefix in kinds:
            frequencies = getattr(module, f"{prefix}inv_freq")
            frequencies.copy_(getattr(module, f"{prefix}original_inv_freq"))
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        is_many = isinstance(module.rope_type, dict)
        short = {x: "default" if f"{x}_" in kinds else y for x, y in module.rope_type.items()} if is_many else "default"
        module.rope_type = short
    return before


def free_frequencies(before: list[tuple[Any, object]]) -> None:
    """Lets the frequencies depend on the length again."""
    for module, kinds in before:
        module.rope_type = kinds

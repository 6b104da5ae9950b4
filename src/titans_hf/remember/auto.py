"""An adapter and its base model, loaded in one call by `AutoModelForCausalLM.from_pretrained(adapter)`."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from .adapter import RememberConfig, load_adapter
from .attach import remember


class RememberForCausalLM(PreTrainedModel):
    """Loads base models with a memory; no model is of this class."""

    config_class = RememberConfig

    @classmethod
    def from_pretrained(cls, adapter: str | Path, *args: Any, **options: Any) -> PreTrainedModel:
        """Returns the base model of an adapter with its memory. `options` are arguments for the base model, such as
        `dtype`, `device_map` and `quantization_config`, or fields of the adapter's configuration, such as `window`.

        Raises ValueError for a bad adapter.
        """
        config = options.pop("config")
        for name in ("adapter_kwargs", "use_safetensors"):
            options.pop(name, None)
        place = {name: options.pop(name) for name in ("revision", "subfolder") if name in options}  # of the adapter
        base = config.base_model_name_or_path
        if not base:
            raise ValueError(
                f"{adapter} names no base model: load it yourself and call `remember(model, adapter=...)`."
            )
        loaded = AutoModelForCausalLM.from_pretrained(base, *args, **options)
        config, fast_weights, token_list = load_adapter(loaded, adapter, config, **place)
        given = {"first_token": config.first_token, "learn_from": config.learn_from}
        parts = {"fast_weights": fast_weights, "token_list": token_list}
        return remember(loaded, config.window, config.memory, **parts, **given)

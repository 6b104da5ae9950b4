"""An adapter and its base model, loaded in one call by `AutoModelForCausalLM.from_pretrained(adapter)`."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from .adapter import RememberConfig, load_adapter
from .attach import remember

HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "token")  # for the adapter and its base model


class RememberForCausalLM(PreTrainedModel):
    """Loads base models with a memory; no model is of this class."""

    config_class = RememberConfig

    @classmethod
    def from_pretrained(
        cls, adapter: str | Path, *args: Any, **options: Any
    ) -> PreTrainedModel | tuple[PreTrainedModel, dict]:
        """Returns the base model of an adapter with its memory; with `output_loading_info` also the base model's
        loading info. `options` are arguments for the base model, such as `dtype`, `device_map` and
        `quantization_config`, fields of the adapter's configuration, such as `window`, or arguments for the Hub, which
        hold for both (`token`, `cache_dir`, ...) or for the adapter alone (`revision`, `subfolder`).

        Raises ValueError for a bad adapter, OSError that names adapter and base model if the base model does not load.
        """
        config, with_info = options.pop("config"), options.pop("output_loading_info", False)
        for name in ("adapter_kwargs", "use_safetensors"):
            options.pop(name, None)
        hub = {name: options.pop(name) for name in ("revision", "subfolder") if name in options}  # of the adapter
        hub |= {name: options[name] for name in HUB if name in options}
        base = config.base_model_name_or_path
        if not base:
            raise ValueError(
                f"{adapter} names no base model: load it yourself and call `remember(model, adapter=...)`."
            )
        try:
            model, info = AutoModelForCausalLM.from_pretrained(base, *args, output_loading_info=True, **options)
        except OSError as error:
            raise OSError(f"`adapter` {adapter}: its base model {base} does not load: {error}") from error
        except RecursionError as error:
            raise ValueError(f"`adapter` {adapter} names an adapter as its base model: {base}") from error
        model = remember(model, **load_adapter(model, adapter, config, **hub))
        return (model, info) if with_info else model

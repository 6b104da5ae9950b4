"""Adapter folders: the result of a fit for a base model, 1 to 3 MB, without the base model's weights.

    save_adapter(model, "my-adapter")
    remember(base_model, adapter="my-adapter")                    # a folder, or a name on the Hub
    AutoModelForCausalLM.from_pretrained("my-adapter")            # base model and adapter

`adapter.safetensors` has plain tensors: "A.NAME" (r, in), "B_0.NAME" (out, r) and "rate.NAME" () for each linear layer,
"list.center" (D,), "list.projection" (D, K) and "list.log_sharpness", ..., the numbers of the read-out. `config.json`
has the settings, and `README.md` is the model card.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from .fast_weights import BASE_LAYER, FastWeights, Step, linear_sizes
from .parts import FAST_WEIGHTS, LIST, Memory, memory_of
from .token_list import ReadOut, TokenList

WEIGHTS = "adapter.safetensors"
SETTINGS = ("entries", "threshold")  # of the list
CARD = """# {name}

A memory for {base}: fast weights that learn while the model reads, by the gradient of
its own loss, and a list of surprising tokens. No weight of the base model was trained; none is in this repository.

## Load

```python
from transformers import AutoModelForCausalLM
import titans_hf  # registers adapters

model = AutoModelForCausalLM.from_pretrained("{name}")  # loads {base} too
```

A cache of this model holds the text that it has read: treat it like the text.

## Fit

{texts}

## Licence

The adapter: {licence}. The base model: its own.
"""


class RememberConfig(PreTrainedConfig):
    """The settings of an adapter.

    base_model_name_or_path: the base model. window, memory, learn_from, first_token: arguments of `remember`. step: of
    the fast weights. rank: r. token_list: settings of the list. fit: facts about the fit, such as seed, texts and
    tokens.
    """

    model_type = "remember"

    base_model_name_or_path: str | None = None
    window: int | None = None
    memory: list | None = None
    learn_from: str = "read"
    first_token: int | None = None
    rank: int | None = None
    step: dict | None = None
    token_list: dict | None = None
    fit: dict | None = None


def adapter_tensors(memory: Memory) -> dict[str, Tensor]:
    """Returns the tensors of an adapter by their names in the file."""
    tensors = {}
    if (fast := memory.fast_weights) is not None:
        for name, x in fast.directions.items():
            tensors |= {f"A.{name}": x, f"rate.{name}": torch.tensor(fast.rates[name], dtype=torch.float64)}
        tensors |= {f"B_0.{name}": x for name, x in fast.start.items()}
    if (found := memory.token_list) is not None:
        tensors |= {"list.center": found.center, "list.projection": found.projection}
        tensors |= {f"list.{name}": x for name, x in found.read_out._asdict().items()}
    return {name: x.detach().cpu().contiguous() for name, x in tensors.items()}


def save_adapter(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    fit: dict | None = None,
    licence: str | None = None,
    half: bool = True,
    push_to_hub: str | None = None,
    **options: Any,
) -> None:
    """Writes the adapter of a model with a memory.

    Args:
        model: a model with `remember`.
        folder: created if it does not exist.
        fit: facts about the fit for the card, such as {"texts": [...], "tokens": 90000, "seed": 0}.
        licence: the adapter's licence, for its card.
        half: write directions, start and projection in float16, which halves the file.
        push_to_hub: a name on the Hub, to which the folder is uploaded. `options`: of `HfApi.create_repo`.

    Raises ValueError for a model without a memory.
    """
    memory, folder = memory_of(model), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = adapter_tensors(memory)
    if half:
        tensors = {name: x.half() if x.dim() == 2 else x for name, x in tensors.items()}
    else:
        tensors = {name: x.float() if x.dim() else x for name, x in tensors.items()}
    fast, found, base = memory.fast_weights, memory.token_list, model.name_or_path
    config = RememberConfig(
        architectures=["RememberForCausalLM"],
        # The path of a folder must hold in any working directory.
        base_model_name_or_path=str(Path(base).resolve()) if base and Path(base).is_dir() else base,
        window=memory.window,
        memory=[name for name, x in ((FAST_WEIGHTS, fast), (LIST, found)) if x is not None],
        learn_from=memory.learn_from,
        first_token=memory.first_token,
        rank=None if fast is None else max(map(len, fast.directions.values())),
        step=None if fast is None else asdict(fast.step),
        token_list=None if found is None else {name: getattr(found, name) for name in SETTINGS},
        fit=fit,
    )
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)
    write_card(folder, config, licence)
    if push_to_hub is not None:
        api = HfApi()
        api.create_repo(push_to_hub, exist_ok=True, **options)
        api.upload_folder(repo_id=push_to_hub, folder_path=folder)


def write_card(folder: Path, config: RememberConfig, licence: str | None) -> None:
    """Writes README.md: the base model, the texts of the fit, the licence."""
    base = config.base_model_name_or_path or ""
    on_the_hub = base.count("/") <= 1 and not Path(base).exists() and bool(base)
    facts = config.fit or {}
    texts = "\n".join(f"- {name}: {value}" for name, value in facts.items()) or "Not stated."
    data = ModelCardData(
        base_model=base if on_the_hub else None,
        base_model_relation="adapter" if on_the_hub else None,
        license=licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["titans", "test-time-training", "memory"],
    )
    body = CARD.format(name=folder.name, base=base or "a base model", texts=texts, licence=licence or "not stated")
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}").save(folder / "README.md")


def load_adapter(
    model: PreTrainedModel, adapter: str | Path, config: RememberConfig | None = None, **place: str
) -> tuple[RememberConfig, FastWeights | None, TokenList | None]:
    """Loads an adapter for a model: its settings, or those of `config`; fast weights and list. `place`: the arguments
    `revision` and `subfolder` of `cached_file`.

    Raises ValueError, naming the adapter, if it is missing, damaged or made for another model.
    """
    try:
        config = RememberConfig.from_pretrained(adapter, **place) if config is None else config
        tensors = load_file(cached_file(adapter, WEIGHTS, **place))
        if config.memory is None or not set(config.memory) <= {FAST_WEIGHTS, LIST}:
            raise ValueError(f"its config.json describes a {config.to_dict().get('model_type')} model, not an adapter")
        parts = (
            _fast_weights(model, config, tensors) if FAST_WEIGHTS in config.memory else None,
            _token_list(model, config, tensors) if LIST in config.memory else None,
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, HFValidationError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"`adapter` {adapter} does not fit this {type(model).__name__}: {reason}") from error
    return config, *parts


def _taken(tensors: dict[str, Tensor], name: str, *shape: int | None) -> Tensor:
    """Takes a tensor of a shape, in float32; None stands for any number. Raises ValueError or KeyError."""
    x = tensors[name]
    if x.dim() != len(shape) or any(b is not None and a != b for a, b in zip(x.shape, shape, strict=True)):
        wanted = tuple("any" if n is None else n for n in shape)
        raise ValueError(f"{name} has the shape {tuple(x.shape)}, not {wanted}")
    if not x.is_floating_point() or not bool(x.isfinite().all()):
        raise ValueError(f"{name} has numbers that are not finite")
    return x.float()


def _fast_weights(model: PreTrainedModel, config: RememberConfig, tensors: dict[str, Tensor]) -> FastWeights:
    modules, fast = dict(model.named_modules()), FastWeights({}, {}, {}, {}, Step(**(config.step or {})))
    for name in (x.removeprefix("A.") for x in tensors if x.startswith("A.")):
        sizes = linear_sizes(modules.get(name + BASE_LAYER, modules.get(name)))
        if sizes is None:
            raise ValueError(f"the model has no linear layer {name}")
        fast.directions[name], fast.outputs[name] = _taken(tensors, f"A.{name}", None, sizes[0]), sizes[1]
        fast.rates[name] = float(_taken(tensors, f"rate.{name}"))
        if f"B_0.{name}" in tensors:
            fast.start[name] = _taken(tensors, f"B_0.{name}", sizes[1], len(fast.directions[name]))
    if not fast.directions:
        raise ValueError("it has no fast weights, which its config.json names")
    return fast


def _token_list(model: PreTrainedModel, config: RememberConfig, tensors: dict[str, Tensor]) -> TokenList:
    size = model.config.get_text_config(decoder=True).hidden_size
    shapes = {name: x.shape for name, x in ReadOut.cautious()._asdict().items()}
    numbers = {name: _taken(tensors, f"list.{name}", None) for name in shapes}
    for name, (number,) in shapes.items():
        if len(numbers[name]) != number:
            raise ValueError(f"list.{name} has {len(numbers[name])} numbers, not {number}")
    read_out = ReadOut(**numbers)
    center, projection = _taken(tensors, "list.center", size), _taken(tensors, "list.projection", size, None)
    return TokenList(center, projection, read_out, **(config.token_list or {}))

"""Adapter folders: the result of a fit for a base model, 1 to 3 MB, without the base model's weights.

    save_adapter(model, "my-adapter")
    remember(base_model, adapter="my-adapter")                    # a folder, or a name on the Hub
    AutoModelForCausalLM.from_pretrained("my-adapter")            # base model and adapter

`adapter.safetensors` has plain tensors: "A.NAME" (r, in), "B_0.NAME" (out, r) and "rate.NAME" () for each linear layer,
"list.center" (D,), "list.projection" (D, K) and "list.entry_weight", ..., the numbers of the read-out. `config.json`
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
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from ..cache_files import check_tensor
from .fast_weights import FLOATS, FastWeights, Step, layer_sizes
from .parts import FAST_WEIGHTS, LIST, PARTS, PASSAGES, Memory, check_settings, choose_first_token, memory_of
from .token_list import ReadOut, TokenList

WEIGHTS = "adapter.safetensors"
CARD = Path(__file__).with_name("card.md")
DESCRIPTIONS = {
    PASSAGES: "passages of the text, which are read again where it asks for them",
    FAST_WEIGHTS: "fast weights, which learn while the model reads, by the gradient of its own loss",
    LIST: "a list of surprising tokens",
}


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
    tokenizer: PreTrainedTokenizerBase | None = None,
    push_to_hub: str | None = None,
    **options: Any,
) -> None:
    """Writes the adapter of a model with a memory, of which passages are no part, and the tokenizer with its template.

    Args:
        model: a model with `remember`.
        folder: created if it does not exist.
        fit: facts about the fit for the card, such as {"texts": [...], "tokens": 90000, "seed": 0}.
        licence: the adapter's licence, for its card.
        half: write directions, start and projection in float16, which halves the file.
        tokenizer: by default the one that lies beside the model on this machine, if there is one.
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
        memory=[name for name in memory.parts if name != PASSAGES],
        learn_from=memory.learn_from,
        first_token=memory.first_token,
        rank=None if fast is None else max(map(len, fast.directions.values())),
        step=None if fast is None else asdict(fast.step),
        token_list=None if found is None else {"entries": found.entries, "threshold": found.threshold},
        fit=fit,
    )
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)
    write_card(folder, config, licence)
    tokenizer = tokenizer_of(base, local_files_only=True) if tokenizer is None and base else tokenizer
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if push_to_hub is not None:
        api = HfApi()
        api.create_repo(push_to_hub, exist_ok=True, **options)
        api.upload_folder(repo_id=push_to_hub, folder_path=folder)


def tokenizer_of(path: str | Path, **options: Any) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer in a folder or a repository on the Hub, None if it has none that loads.

    options: of `from_pretrained`, such as `local_files_only`.
    """
    try:
        cached_file(path, "tokenizer_config.json", **options)
        return AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError):
        return None


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
    body = CARD.read_text(encoding="utf-8").format(
        name=folder.name,
        base=base or "a base model",
        parts=", ".join(DESCRIPTIONS[x] for x in PARTS if x in (PASSAGES, *config.memory)),
        texts=texts,
        licence=licence or "not stated",
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}").save(folder / "README.md")


def load_adapter(
    model: PreTrainedModel, adapter: str | Path, config: RememberConfig | None = None, **hub: Any
) -> dict[str, Any]:
    """Loads an adapter for a model: returns arguments of `remember`, by the adapter's settings or those of `config`.
    `hub`: arguments of `cached_file`, such as `revision` and `token`.

    Raises ValueError, naming the adapter, if it is missing, damaged or made for another model.
    """
    try:
        config = RememberConfig.from_pretrained(adapter, **hub) if config is None else config
        tensors = load_file(cached_file(adapter, WEIGHTS, **hub))
        if config.memory is None or not set(config.memory) <= {FAST_WEIGHTS, LIST}:
            raise ValueError(f"its config.json describes a {config.to_dict().get('model_type')} model, not an adapter")
        fast_weights = _fast_weights(model, config, tensors) if FAST_WEIGHTS in config.memory else None
        token_list = _token_list(config, tensors) if LIST in config.memory else None
        for part in (fast_weights, token_list):
            if part is not None:
                part.check(model)
        check_settings(model, config.window, config.learn_from)
        first_token = choose_first_token(model, config.first_token)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError, HFValidationError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"`adapter` {adapter} does not fit this {type(model).__name__}: {reason}") from error
    parts = {"memory": [PASSAGES, *config.memory], "fast_weights": fast_weights, "token_list": token_list}
    return {"window": config.window, "first_token": first_token, "learn_from": config.learn_from, **parts}


def _fast_weights(model: PreTrainedModel, config: RememberConfig, tensors: dict[str, Tensor]) -> FastWeights:
    names = [name.removeprefix("A.") for name in tensors if name.startswith("A.")]
    rates = {name: float(check_tensor(x := f"rate.{name}", tensors[x], (), FLOATS)) for name in names}
    outputs = {name: layer_sizes(model, name)[1] for name in names}
    directions = {name: tensors[f"A.{name}"].float() for name in names}
    start = {name: tensors[f"B_0.{name}"].float() for name in names if f"B_0.{name}" in tensors}
    return FastWeights(directions, rates, outputs, start, Step(**(config.step or {})))


def _token_list(config: RememberConfig, tensors: dict[str, Tensor]) -> TokenList:
    center, projection, *numbers = (tensors[f"list.{x}"].float() for x in ("center", "projection", *ReadOut._fields))
    return TokenList(center, projection, ReadOut(*numbers), **(config.token_list or {}))

"""`remember(model)`: gives a causal language model of Transformers a memory of what it has read, in place.

The model keeps its weights, its class's name and its files. Its class becomes a subclass of its own class whose
`forward` reads with a `MemoryCache`; `forget` undoes that.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import SupportsIndex

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg

from ..cache_titans import base_model
from ..generation_titans import EndedRowsMixin, check_prompt
from .cache import MemoryCache
from .columns import Columns
from .passages import Passages
from .reading import check_backbone
from .recall import read_call
from .rotary import fix_frequencies, free_frequencies
from .settings import Memory, resolve
from .window import PREFIX, register_attention, set_window_attention

DEFAULT_PASSAGES = Passages()
CHECK_LENGTH, CHECK_WINDOW = 24, 8  # of the text that a new memory is tried with, in tokens
# Of logits, relative to the largest; 0.1 in other dtypes. Many float64 models compute partly in float32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}


# Inside of `generate()`: the columns of its prompt, and the caches of the calls, its own and others.
_GENERATION: ContextVar[tuple[int, list[MemoryCache]] | None] = ContextVar("generation", default=None)


def remember(
    model: PreTrainedModel,
    window: int = 1024,
    *,
    passages: Passages | None = DEFAULT_PASSAGES,
    first_token: int | None = None,
) -> PreTrainedModel:
    """Gives a causal language model a memory of the text that it has read, in place, and returns the model.

    The model attends to a window. What has left it is kept as token ids; when an answer is due, the passages that the
    prompt asks for are read again: by `generate()`, or where a call says `recall=True`.

    `model(ids, cache=cache, recall=True)` recalls before the first of ids (R, T), by at most 64 tokens read before it,
    since `cache.start_prompt()` if that was called. The call's own tokens ask for nothing: else its logits would depend
    on tokens after them. So a question is read by one call, and the next call recalls. `recall=False` ends a recall.

    Args:
        model: any causal language model of Transformers that uses the attention interface and has a layer of full
            attention, also inside of PEFT's.
        window: tokens that a query of a full-attention layer sees. Sliding and recurrent layers stay as they are.
        passages: how passages are chosen and read again; None for the window alone.
        first_token: the token of the sink, by default the model's begin token.

    Raises ValueError for a model that already has a memory or can have none, for a bad argument, and for a model that
    does not read exactly with a window, as a random text shows. After an error, the model is unchanged.
    """
    whole, model = model, base_model(model)
    memory = resolve(model, window, passages, first_token)
    memory.own_attention = set_window_attention(model)
    try:
        attach(model, memory)
        check_reading(model)
    except BaseException:
        forget(model)
        raise
    return whole


def forget(model: PreTrainedModel) -> PreTrainedModel:
    """Removes the memory from a model, in place, and returns the model as it was before `remember`."""
    whole, model = model, base_model(model)
    memory = model.__dict__.pop("memory", None)
    if memory is None:
        raise ValueError(f"`model` is a {type(model).__name__} without a memory.")
    for hook in memory.hooks:
        hook.remove()
    if issubclass(type(model), RememberingModel):
        model.__class__ = type(model).__bases__[1]
        _set_hooked_forward(model)
    if "_old_forward" not in model.__dict__:  # what was compiled, or wrapped by accelerate, reads with the memory
        model.__dict__.pop("forward", None)
        model.__dict__.pop("_original_forward", None)
    for module in memory.checkpointed:
        module.gradient_checkpointing = True
    free_frequencies(memory.frequencies)
    model.set_attn_implementation(memory.own_attention)
    return whole


@contextmanager
def remembering(model: PreTrainedModel, *args, **kwargs) -> Iterator[PreTrainedModel]:
    """Gives a model a memory inside of a block, with the arguments of `remember`; at the block's end it forgets."""
    remember(model, *args, **kwargs)
    try:
        yield model
    finally:
        forget(model)


def attach(model: PreTrainedModel, memory: Memory) -> None:
    """Lets a model read with a memory."""
    model.memory = memory
    if model.base_model is not model:
        memory.hooks.append(model.base_model.register_forward_pre_hook(check_backbone))
    stop_checkpointing(model)
    memory.frequencies = fix_frequencies(model)
    model.__class__ = remembering_class(type(model))
    _set_hooked_forward(model)


def stop_checkpointing(model: PreTrainedModel) -> None:
    """Turns gradient checkpointing off until `forget`: in training it takes the cache from the layers."""
    model.memory.checkpointed = [x for x in model.modules() if getattr(x, "gradient_checkpointing", False)]
    for module in model.memory.checkpointed:
        module.gradient_checkpointing = False


def _set_hooked_forward(model: PreTrainedModel) -> None:
    """Lets accelerate's hooks, which keep a model's former forward, call the forward of its class."""
    if "_old_forward" in model.__dict__:
        model._old_forward = type(model).forward.__get__(model)


@torch.no_grad()
def check_reading(model: PreTrainedModel) -> None:
    """Reads a random text beyond a small window, whole and in pieces. Raises ValueError if the logits differ, or if the
    window has no effect.
    """
    memory, training, name = model.memory, model.training, type(model).__name__
    embeddings = model.get_input_embeddings().weight
    size, device = len(embeddings), "cpu" if embeddings.is_meta else embeddings.device  # accelerate moves inputs
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(size, 1000), (1, CHECK_LENGTH), generator=generator).to(device)
    model.eval()
    try:
        results, small, large = [], min(CHECK_WINDOW, memory.window), 2 * CHECK_LENGTH
        for tried, pieces in ((large, [CHECK_LENGTH]), (small, [CHECK_LENGTH]), (small, [5, 1, 9, 9])):
            model.memory = replace(memory, window=tried, passages=None)
            cache = MemoryCache(model)
            results.append(torch.cat([model(x, cache=cache).logits for x in ids.split(pieces, 1)], 1))
    finally:
        model.memory = memory
        model.train(training)
    full, whole, in_pieces = (x[0].double() for x in results)
    allowed = TOLERANCE.get(results[0].dtype, 0.1) * float(full.abs().max())
    if not float((whole - in_pieces).abs().max()) <= allowed:
        kind = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
        why = "" if kind is None else f" Its weights are quantised ({getattr(kind, 'value', kind)}): try another dtype."
        raise ValueError(f"`model` is a {name}, whose logits differ if a text is read in pieces.{why}")
    if float((full[:small] - whole[:small]).abs().max()) > allowed:
        raise ValueError(f"`model` is a {name}, whose window changes the logits within the window.")
    if torch.equal(full[small:], whole[small:]):
        raise ValueError(f"`model` is a {name}, which ignores a window of attention.")


class KeptCacheMixin(GenerationMixin):
    """`generate()` that goes on with its cache: Phi-3 drops it where its rotary frequencies would change."""

    def prepare_inputs_for_generation(self, *args, **kwargs) -> dict:
        cache = kwargs.pop("cache", None)
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs if cache is None else inputs | {"cache": cache}


class RememberingModel(EndedRowsMixin, KeptCacheMixin):
    """The methods that a model with a memory has before its own class's methods."""

    memory: Memory

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        """Copies and pickles the model, whose class cannot be found by its name."""
        return _new_instance, (type(self).__bases__[1],), self.__dict__

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        register_attention(self.memory.own_attention)
        _set_hooked_forward(self)

    def set_attn_implementation(self, attn_implementation: str, **kwargs) -> None:
        """Sets the attention inside of the window."""
        super().set_attn_implementation(attn_implementation, **kwargs)
        if not str(attn_implementation).startswith(PREFIX):
            self.memory.own_attention = set_window_attention(self)

    def gradient_checkpointing_enable(self, *args, **kwargs) -> None:
        """Turns gradient checkpointing on from `forget` on."""
        super().gradient_checkpointing_enable(*args, **kwargs)
        stop_checkpointing(self)

    def gradient_checkpointing_disable(self) -> None:
        """Turns gradient checkpointing off."""
        super().gradient_checkpointing_disable()
        stop_checkpointing(self)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        """Gives `generate()` a `MemoryCache`: Transformers would make a cache by the configuration."""
        if isinstance(model_kwargs.get("cache"), MemoryCache):
            check_prompt(generation_config, model_kwargs, generation_mode)
        elif generation_config.use_cache is False and generation_config.guidance_scale not in (None, 1):
            raise ValueError("`use_cache` must be True with `guidance_scale`, for a model with a memory, got False.")
        elif model_kwargs.get("cache") is None and generation_config.use_cache is not False:
            if generation_config.cache_implementation is not None:
                kind = generation_config.cache_implementation
                raise ValueError(f"`cache_implementation` must be None for a model with a memory, got {kind!r}.")
            model_kwargs["cache"] = MemoryCache(self)
        if isinstance(cache := model_kwargs.get("cache"), MemoryCache):
            num_columns, caches = _GENERATION.get()
            caches.append(cache)
            cache.prompt_end, cache.in_answer = num_columns, False
            cache.recalled = [[] for _ in cache.recalled]
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def generate(self, inputs: Tensor | None = None, *args, **kwargs):
        """Generates as the model's own class does. Rows recall at the last token of the prompt, and again after every
        `passages.every` generated tokens. What follows is the next prompt, by which passages are chosen.
        """
        prompt = kwargs.get("input_ids") if inputs is None else inputs
        number = 1 if prompt is None or not prompt.numel() else prompt.shape[-1]  # Transformers begins with one token
        caches: list[MemoryCache] = []
        token = _GENERATION.set((number, caches))
        try:
            return super().generate(inputs, *args, **kwargs)
        finally:
            _GENERATION.reset(token)
            for cache in caches:
                cache.prompt_end, cache.in_answer = None, False
                cache.end_recall()
                cache.begin_prompt()


def remembering_class(own: type[PreTrainedModel]) -> type:
    """Returns the subclass of a model's class that reads with a memory, under the same name."""
    signature = inspect.signature(own.forward)
    names = [*signature.parameters][1:]

    def forward(self, *args, **kwargs):
        return _forward(self, **dict(zip(names[: len(args)], args, strict=True)), **kwargs)

    vars(forward)["__signature__"] = signature
    forward = deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(forward)
    fields = {name: getattr(own, name) for name in ("__module__", "__doc__", "__qualname__")}
    return type(own.__name__, (RememberingModel, own), {"forward": forward} | fields)


def _new_instance(own: type[PreTrainedModel]) -> RememberingModel:
    """Returns a model without state, whose class reads with a memory."""
    return object.__new__(remembering_class(own))


def _forward(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: MemoryCache | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    recall: bool | None = None,
    return_dict: bool | None = None,
    num_items_in_batch: int | Tensor | None = None,
    output_hidden_states: bool | None = None,
    output_router_logits: bool | None = None,
    **others,
) -> CausalLMOutputWithPast | tuple:
    """The forward pass with a memory: logits of every column, 0 at padding."""
    if cache is not None and not isinstance(cache, MemoryCache):
        raise ValueError(f"`cache` must be a MemoryCache for a model with a memory, got {type(cache).__name__}.")
    if input_ids is None:
        raise ValueError("`input_ids` must be given to a model with a memory: it keeps token ids.")
    if recall and model.memory.passages is None:
        raise ValueError("`recall` needs passages, and this memory is a window alone.")
    if cache is not None and cache.memory is not model.memory:
        raise ValueError("`cache` must belong to this model: create it by `MemoryCache(model)`.")
    _check_others(model, others)
    returns_cache = use_cache is not False or cache is not None
    cache = MemoryCache(model) if cache is None else cache
    columns = _columns(input_ids, attention_mask, position_ids)
    columns = _of_generation(model, cache, columns, returns_cache)
    length, number = input_ids.shape[1], logits_to_keep if isinstance(logits_to_keep, int) else None
    num_kept = min(number, length) if number and labels is None else length
    asked = {"output_hidden_states": output_hidden_states, "output_router_logits": output_router_logits}
    asked = {name: value for name, value in asked.items() if value is not None}
    logits, of_layers = read_call(model, cache, columns, num_kept, asked, recall)
    output = {"logits": logits if number is not None else logits[:, logits_to_keep], **of_layers}
    output["cache"] = cache if returns_cache else None
    if labels is not None:
        options = {"vocab_size": model.config.get_text_config(decoder=True).vocab_size}
        options["num_items_in_batch"] = num_items_in_batch
        output["loss"] = model.loss_function(logits=output["logits"], labels=labels, **options)
    if "router_logits" in output:
        _add_auxiliary_loss(model, output, columns.real)
    result = (MoeCausalLMOutputWithPast if "router_logits" in output else CausalLMOutputWithPast)(**output)
    return result.to_tuple() if return_dict is False else result


def _add_auxiliary_loss(model: PreTrainedModel, output: dict, real: Tensor) -> None:
    """Adds the loss of a mixture of experts over all tokens of a call, from router logits (R, T, experts), which become
    (R * T, experts), as the model returns them.
    """
    routers = output["router_logits"] = tuple(x.flatten(0, 1) for x in output["router_logits"])
    of_routers = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if of_routers is not None:
        mask = None if bool(real.all()) else real
        loss = output["aux_loss"] = of_routers(routers, model.num_experts, model.num_experts_per_tok, mask)
        if "loss" in output:
            output["loss"] = output["loss"] + model.router_aux_loss_coef * loss.to(output["loss"].device)


def _check_others(model: PreTrainedModel, arguments: dict) -> None:
    """Raises ValueError for an argument that reading in pieces would change, also one that PEFT's model keeps."""
    layers = (x for x in model.modules() if hasattr(x, "lora_A")) if hasattr(model, "peft_config") else ()
    for hook in next((x._forward_pre_hooks.values() for x in layers), ()):
        for name in {"adapter_names", "alora_offsets"} & getattr(hook, "keywords", {}).keys():
            raise ValueError(f"PEFT's `{name}` must be None for a model with a memory, which reads rows apart.")
    if "token_type_ids" not in model.memory.arguments:
        arguments.pop("token_type_ids", None)
    if arguments.pop("output_attentions", None):
        raise ValueError("`output_attentions` must be False for a model with a memory: a call is read in pieces.")
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name != "cache_position" and value.numel() > 1:
            raise ValueError(f"`{name}` has no meaning for a model with a memory, which reads `input_ids` in pieces.")


def _columns(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Columns:
    """Returns the columns of a call. A token whose position is 0 begins a document, if the call has one before."""
    length = ids.shape[1]
    real = torch.ones(ids.shape, dtype=torch.bool)
    if mask is not None:
        if mask.dim() != 2 or mask.shape[1] < length or len(mask) != len(ids):
            raise ValueError(
                f"`attention_mask` must be {tuple(ids.shape)}, or with earlier columns, got {tuple(mask.shape)}."
            )
        real = (mask[:, -length:] != 0).cpu()
    starts = torch.zeros_like(real)
    if positions is not None and positions.dim() == 2 and length > 1:
        is_first = positions[:, -length:].cpu() == 0
        starts = is_first & real & (real.cumsum(1) > 1)
    return Columns(ids.to(torch.int64), real, starts, torch.zeros_like(real))


def _of_generation(model: PreTrainedModel, cache: MemoryCache, columns: Columns, returns_cache: bool) -> Columns:
    """Returns the columns of a call inside of `generate()`: after which of them the rows recall. Of any other cache
    than that of `generate()`, as guidance has it, the first call is the prompt.
    """
    if (generation := _GENERATION.get()) is None or (passages := model.memory.passages) is None:
        return columns
    length, begin = columns.width, cache.get_seq_length()
    if cache.prompt_end is None:
        cache.prompt_end, cache.in_answer = begin + length if returns_cache else generation[0], False
    since = begin - cache.prompt_end + 1 + torch.arange(length)[None]  # of own tokens up to each, (1, T)
    if cache.in_answer and cache.since_recall is not None:  # each row by its own last recall
        since = cache.since_recall[:, None] + 1 + torch.arange(length)
    cache.in_answer = begin + length >= cache.prompt_end
    recalls = (since >= 0) & (since % passages.every == 0)
    return columns._replace(recalls=recalls.expand(columns.ids.shape))

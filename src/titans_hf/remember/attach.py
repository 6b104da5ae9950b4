"""`remember(model)`: gives a causal language model of Transformers a memory of what it has read, in place.

The model keeps its weights, its class's name and its files. Its class becomes a subclass of its own class whose
`forward` reads with a `MemoryCache`; `forget` undoes that.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg

from ..cache_titans import base_model
from ..generation_titans import EndedRowsMixin, check_prompt
from . import reading
from . import recall as recalling
from .adapter import load_adapter
from .cache import MemoryCache
from .columns import CallColumns
from .fast_weights import FastWeights, decoder_layers, linear_layers, random_fast_weights
from .parts import FAST_WEIGHTS, LIST, PARTS, PASSAGES, Memory, check_settings, choose_first_token, end_tokens
from .passages import Passages
from .titans_layer import is_titans
from .token_list import TokenList
from .window import PREFIX, KeyValueLayer, register_attention, set_window_attention

# Value projections alone, else joined with others, else outputs. Values have the shape of keys: only names differ.
VALUES = ("v_proj",), ("qkv_proj", "c_attn", "query_key_value", "Wqkv"), ("o_proj", "out_proj", "down_proj")
WINDOW = 1024  # without an adapter
CHECK_LENGTH, CHECK_WINDOW = 24, 8  # of the text that a new memory is tried with, in tokens
# Of logits, relative to the largest; 0.1 in other dtypes. Many float64 models compute partly in float32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}


# Inside of `generate()`: the columns of its prompt, and the caches of the calls, its own and others.
_GENERATION: ContextVar[tuple[int, list[MemoryCache]] | None] = ContextVar("generation", default=None)


def remember(
    model: PreTrainedModel,
    window: int | str | None = "auto",
    memory: Sequence[str] | None = None,
    *,
    adapter: str | Path | None = None,
    passages: Passages | None = None,
    fast_weights: FastWeights | None = None,
    token_list: TokenList | None = None,
    first_token: int | None = None,
    learn_from: str | None = None,
) -> PreTrainedModel:
    """Gives a causal language model a memory of the text that it has read, in place, and returns the model.

    Args:
        model: any causal language model of Transformers that uses the attention interface, also inside of PEFT's.
        window: tokens that a query of a full-attention layer sees. None keeps full attention. Sliding and recurrent
            layers stay as they are. "auto" is the window of the adapter, without one 1,024, and None for a Titans.
        memory: which of "passages" (text that has left the window is read again where it is asked for), "fast_weights"
            and "list". None is passages and the parts that are passed or that the adapter has, or fast weights for a
            Titans. Without a window no text leaves it, and there are no passages.
        adapter: a folder, or a name on the Hub, with fitted fast weights and list, as `save_adapter` writes it.
        passages: settings of passages.
        fast_weights: fitted fast weights; by default random directions on the value projections, which need no fit.
        token_list: a fitted list; by default a random projection with a cautious read-out.
        first_token: the token of the sink, by default the model's begin token.
        learn_from: "read" learns only from prompts and texts, "all" also from the tokens that `generate()` makes. By
            default the adapter's, and "read" without one.

    Raises ValueError for a model that already has a memory, for a bad argument, and for a model that does not read
    exactly with a window, as a random text shows. After an error, the model is unchanged.
    """
    whole, model = model, base_model(model)
    if hasattr(model, "memory"):
        raise ValueError("`model` has a memory already: call `forget(model)` first.")
    if "forward" in model.__dict__ and "_old_forward" not in model.__dict__:
        raise ValueError("`model.forward` was replaced, as torch.compile and accelerate do: call `remember` before.")
    if memory is None:
        given = {PASSAGES: not is_titans(model), FAST_WEIGHTS: fast_weights, LIST: token_list}
        memory = PARTS if adapter is not None else [name for name, x in given.items() if x] or [FAST_WEIGHTS]
    memory = (memory,) if isinstance(memory, str) else memory
    if unknown := set(memory) - set(PARTS):
        raise ValueError(f"`memory` may hold {', '.join(map(repr, PARTS))}, got {sorted(unknown)}.")
    if adapter is not None:
        found = load_adapter(model, adapter)
        memory = [x for x in memory if x in found["memory"]]
        window = found["window"] if window == "auto" else window
        given = dict(first_token=first_token, learn_from=learn_from, fast_weights=fast_weights, token_list=token_list)
        first_token, learn_from, fast_weights, token_list = (found[k] if x is None else x for k, x in given.items())
    if window == "auto":
        window = None if is_titans(model) else WINDOW
    learn_from = learn_from or "read"
    check_settings(model, window, learn_from)
    if fast_weights is not None:
        fast_weights.check(model)
    if FAST_WEIGHTS in memory and any(x.is_inference() for x in model.state_dict().values()):
        raise ValueError("`model` has weights from `torch.inference_mode()`, by which nothing learns: load it outside.")
    config = model.config.get_text_config(decoder=True)
    if fast_weights is None and FAST_WEIGHTS in memory:
        fast_weights = default_fast_weights(model)
    passages = passages or Passages()
    if passages.end_tokens is None:
        passages = replace(passages, end_tokens=end_tokens(model.generation_config or config))
    own = type(model)
    new = Memory(
        window=window,
        passages=None if window is None or PASSAGES not in memory else passages,
        fast_weights=fast_weights if FAST_WEIGHTS in memory else None,
        token_list=(token_list or TokenList.random(config.hidden_size)) if LIST in memory else None,
        first_token=choose_first_token(model, first_token),
        learn_from=learn_from,
        forward=own.forward,
        arguments=frozenset(inspect.signature(own.forward).parameters),
    )
    own_attention = model.config.get_text_config(decoder=True)._attn_implementation
    if is_titans(model):
        new.own_attention, new.own_learning = own_attention, model.memory_learning
    else:
        new.own_attention = set_window_attention(model)
    try:
        attach(model, new)
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
    model.set_attn_implementation(memory.own_attention)
    if is_titans(model):
        model.set_memory_learning(memory.own_learning)
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
    if memory.fast_weights is not None:
        memory.hooks += memory.fast_weights.attach(model)
    if memory.token_list is not None:
        memory.hooks.append(feed_forward(model).register_forward_pre_hook(reading.note_mlp_inputs))
    if model.base_model is not model:
        memory.hooks.append(model.base_model.register_forward_pre_hook(reading.check_backbone))
    stop_checkpointing(model)
    layers = MemoryCache(model).layers
    memory.has_states = any(hasattr(x, "mark_start") for x in layers)
    if not any(isinstance(x, KeyValueLayer) and not x.is_sliding for x in layers):
        memory.passages = None  # no layer could see them
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


def default_fast_weights(model: PreTrainedModel) -> FastWeights:
    """Returns random directions on the value projections of the upper half of the layers, without the last layer."""
    number = len(decoder_layers(model)[1])
    layers = range(number // 2, max(number - 1, number // 2 + 1))
    kinds = next((x for x in VALUES if linear_layers(model, layers, x)), None)
    if kinds is None:
        raise ValueError(f"`model` is a {type(model).__name__} without known value projections: pass `fast_weights`.")
    return random_fast_weights(model, layers, kinds, rank=16, rate=4.0)


def feed_forward(model: PreTrainedModel) -> torch.nn.Module:
    """Returns the feed-forward network of a model's last layer, its first part with matrices and a single input, or, if
    there is none, the output embeddings.
    """
    for part in decoder_layers(model)[1][-1].children():
        inputs = [*inspect.signature(type(part).forward).parameters][1:]
        if len(inputs) == 1 and any(x.dim() > 1 for x in part.parameters()):
            return part
    return model.get_output_embeddings()


@torch.no_grad()
def check_reading(model: PreTrainedModel) -> None:
    """Reads a random text beyond a small window, whole and in pieces. Raises ValueError if the logits differ, or if the
    window has no effect.
    """
    memory, training = model.memory, model.training
    window, learning = memory.window, memory.learning
    embeddings = model.get_input_embeddings().weight
    size, device = len(embeddings), "cpu" if embeddings.is_meta else embeddings.device  # accelerate moves inputs
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(size, 1000), (1, CHECK_LENGTH), generator=generator).to(device)
    has_window = any(not getattr(x, "is_sliding", True) for x in MemoryCache(model).layers)
    tried_window = CHECK_WINDOW if has_window else None
    model.eval()
    memory.learning = False
    try:
        results = []
        for tried, pieces in ((None, [CHECK_LENGTH]), (tried_window, [CHECK_LENGTH]), (tried_window, [5, 1, 9, 9])):
            memory.window = tried
            cache = MemoryCache(model)
            results.append(torch.cat([model(x, cache=cache).logits for x in ids.split(pieces, 1)], 1))
    finally:
        memory.window, memory.learning = window, learning
        model.train(training)
    full, whole, in_pieces = (x[0].double() for x in results)
    allowed = TOLERANCE.get(results[0].dtype, 0.1) * float(full.abs().max())
    if not float((whole - in_pieces).abs().max()) <= allowed:
        raise ValueError(f"`model` is a {type(model).__name__}, whose logits differ if a text is read in pieces.")
    if has_window and float((full[:CHECK_WINDOW] - whole[:CHECK_WINDOW]).abs().max()) > allowed:
        raise ValueError(f"`model` is a {type(model).__name__}, whose window changes the logits within the window.")
    if has_window and torch.equal(full[CHECK_WINDOW:], whole[CHECK_WINDOW:]):
        raise ValueError(f"`model` is a {type(model).__name__}, which ignores a window of attention.")


class RememberingModel(EndedRowsMixin):
    """The methods that a model with a memory has before its own class's methods."""

    memory: Memory

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Copies and pickles the model, whose class cannot be found by its name."""
        return _new_instance, (type(self).__bases__[1],), self.__dict__

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        register_attention(self.memory.own_attention)
        _set_hooked_forward(self)

    @property
    def memory_learning(self) -> bool:
        """Whether the memory learns while the model reads."""
        return self.memory.learning

    def set_memory_learning(self, learning: bool = True) -> None:
        """Lets the memory learn while the model reads, or read without learning."""
        self.memory.learning = bool(learning)
        if is_titans(self):
            super().set_memory_learning(learning)

    def set_attn_implementation(self, attn_implementation: str, **kwargs) -> None:
        """Sets the attention inside of the window."""
        super().set_attn_implementation(attn_implementation, **kwargs)
        if is_titans(self):
            self.memory.own_attention = attn_implementation
        elif not str(attn_implementation).startswith(PREFIX):
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
            cache.prompt_end, cache.recalled = num_columns, []
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def generate(self, inputs: Tensor | None = None, *args, **kwargs):
        """Generates as the model's own class does; with learn_from="read" the memory does not learn the generated
        tokens. Rows recall at the last token of the prompt, and again after every `passages.every` generated tokens.
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
                cache.prompt_end = None
                cache.end_recall()


def remembering_class(own: type) -> type:
    """Returns the subclass of a model's class that reads with a memory, under the same name."""
    signature = inspect.signature(own.forward)
    names = [*signature.parameters][1:]

    def forward(self, *args, **kwargs):
        return _forward(self, **dict(zip(names[: len(args)], args, strict=True)), **kwargs)

    forward.__signature__ = signature
    forward = deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(forward)
    fields = {name: getattr(own, name) for name in ("__module__", "__doc__", "__qualname__")}
    return type(own.__name__, (RememberingModel, own), {"forward": forward} | fields)


def _new_instance(own: type) -> RememberingModel:
    """Returns a model without state, whose class reads with a memory."""
    made = remembering_class(own)
    return made.__new__(made)


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
        raise ValueError("`input_ids` must be given to a model with a memory: it learns which token follows.")
    if recall and model.memory.passages is None and model.memory.window is not None:
        raise ValueError("`recall` needs a memory with passages, which need a layer of full attention with a window.")
    _check_others(model, others)
    returns_cache = use_cache is not False or cache is not None
    cache = MemoryCache(model) if cache is None else cache
    columns = _columns(model, input_ids, attention_mask, position_ids)
    columns = _of_generation(model, cache, columns, returns_cache)
    length, is_number = input_ids.shape[1], isinstance(logits_to_keep, int)
    num_kept = min(logits_to_keep, length) if is_number and logits_to_keep and labels is None else length
    asked = {"output_hidden_states": output_hidden_states, "output_router_logits": output_router_logits}
    asked = {name: value for name, value in asked.items() if value is not None}
    logits, of_layers = recalling.read(model, cache, columns, num_kept, asked, recall)
    output = {"logits": logits if is_number else logits[:, logits_to_keep], **of_layers}
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


def _columns(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> CallColumns:
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
    learning = torch.full_like(real, model.memory.learning)
    return CallColumns(ids, real, starts, real & learning, learning, torch.zeros_like(real))


def _of_generation(
    model: PreTrainedModel, cache: MemoryCache, columns: CallColumns, returns_cache: bool
) -> CallColumns:
    """Returns the columns of a call inside of `generate()`: which are learned, and after which the rows recall. Of any
    other cache than that of `generate()`, as guidance has it, the first call is the prompt.
    """
    if (generation := _GENERATION.get()) is None:
        return columns
    memory, length, begin = model.memory, columns.ids.shape[1], cache.get_seq_length()
    if cache.prompt_end is None:
        cache.prompt_end = begin + length if returns_cache else generation[0]
    number = begin + torch.arange(length) - cache.prompt_end  # of own tokens before each, (T,)
    if memory.learn_from == "read":
        columns = columns._replace(learns=columns.learns & (number < 0))
    if memory.passages is not None:
        every, since = memory.passages.every, number[None] + 1
        if cache.prompt_end == 0 and cache.since_recall is not None:  # each row by its own last recall
            since = cache.since_recall[:, None] + 1 + torch.arange(length)
        columns = columns._replace(recalls=((since >= 0) & (since % every == 0)).expand(columns.ids.shape))
    if begin + length >= cache.prompt_end:
        cache.prompt_end = 0  # all that follows is an answer
    return columns

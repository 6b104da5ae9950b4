"""Titans for Transformers: the four variants of section 4 of "Titans: Learning to Memorize at Test Time"."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .cache_titans import TitansCache, check_cache_class, undone_on_error
from .configuration_titans import TitansConfig, check_config
from .generation_titans import TitansGenerationMixin
from .mixers_titans import LayerSurprise, TitansMixer, make_mixer
from .neural_memory import (
    OUTPUT_SCALE,
    ChannelConv,
    InitialWeights,
    NeuralMemory,
    OutputProjection,
    TitansRMSNorm,
    TokenGate,
)
from .parallel_titans import register_parallel_styles
from .token_grid import TokenLayout, check_inputs

try:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS_BY_MODEL_TYPE
except ImportError:  # PEFT is optional
    TARGETS_BY_MODEL_TYPE = {}

CACHE_PLACE = 3  # position of the cache among the arguments of a generic head
# The projections of attention and of the memory, which share these names.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def register_lora_targets(model_type: str) -> None:
    """Makes LORA_TARGETS the default of PEFT for `model_type`, unless PEFT has a default for it, so that `LoraConfig()`
    needs no `target_modules`.
    """
    TARGETS_BY_MODEL_TYPE.setdefault(model_type, LORA_TARGETS)


register_lora_targets(TitansConfig.model_type)


def refuse_layer(**kwargs) -> None:
    """Raises ValueError where a cache of Transformers makes a layer of a Titans model."""
    raise ValueError("`config` is a Titans model's, which reads a `titans_hf.TitansCache(config)` and no other cache.")


for layers_by_type in (DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING):
    layers_by_type["titans"] = refuse_layer
register_parallel_styles()
# Trainer shifts labels for label smoothing only if the class name is in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(TitansConfig.model_type, "TitansForCausalLM")


@dataclass
class TitansModelOutput(BaseModelOutputWithPast):
    """surprise: one `LayerSurprise` per layer."""

    surprise: tuple[LayerSurprise, ...] | None = None


@dataclass
class TitansCausalLMOutput(CausalLMOutputWithPast):
    """surprise: one `LayerSurprise` per layer."""

    surprise: tuple[LayerSurprise, ...] | None = None


class TitansMLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class TitansDecoderLayer(GradientCheckpointingLayer):
    """Computes x += mixer(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.mixer_norm = TitansRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = make_mixer(config, layer_idx)
        self.mlp_norm = TitansRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = TitansMLP(config, layer_idx)

    def forward(self, hidden_states: Tensor, layout: TokenLayout, cache: TitansCache | None = None, **kwargs) -> Tensor:
        """Computes the layer's output (B, T, hidden), and updates its part of the cache. `kwargs` go to the attention
        function.
        """
        inputs = self.mixer_norm(hidden_states)
        hidden_states = hidden_states + self.mixer(inputs, layout, cache=cache, **kwargs)[0]
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class TitansPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation, as in every Transformers model."""

    config: TitansConfig
    config_class = TitansConfig
    cache_class = TitansCache  # from the model's own code, which may be a checkpoint's
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TitansDecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _memory_learning = True
    _can_compile_fullgraph = True  # with a compileable cache also without a recompilation (tests/model/test_compile.py)
    _can_record_outputs = {
        "hidden_states": TitansDecoderLayer,
        "attentions": OutputRecorder(TitansMixer, index=1),
        "surprise": OutputRecorder(TitansMixer, index=2),
    }

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> None:
        """Saves as every model of Transformers. Raises ValueError for a memory with a network or an inner loss of one's
        own, which no config can name: the checkpoint would be read by another rule.
        """
        for name, module in self.named_modules():
            if isinstance(module, NeuralMemory) and (own := module.functions_of_its_own):
                raise ValueError(
                    f"The model cannot be saved: the {' and the '.join(own)} of {name} is a function of your own, "
                    "which config.json cannot name. Save `model.state_dict()`, and set the function anew after loading."
                )
        super().save_pretrained(save_directory, **kwargs)

    @property
    def memory_learning(self) -> bool:
        """True if calls update the memory, as `set_memory_learning` has set it."""
        return self.base_model._memory_learning

    def set_memory_learning(self, learning: bool) -> None:
        """Turns learning at test time off or on again, for all calls that begin later.

        While it is off, the memory is only read: nothing is written or forgotten, and weights and momentum stay equal
        to the bit. Attention's window, the inputs of the convolutions and the count of tokens go on. A document's
        initial memory, after the persistent tokens, is the same with learning on or off.

        The switch belongs to this object, which `save_pretrained` does not save. A call reads it once, when it begins;
        `generate()` makes a call for each token. Threads that share the model share the switch.

        Raises ValueError for a value that is not a bool.
        """
        if not isinstance(learning, bool):
            raise ValueError(f"`learning` must be True or False, but is {learning!r}.")
        self.base_model._memory_learning = learning

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # In a checkpoint's own code, Transformers skips modules without parameters of their own, so each branch
        # initialises the parameters of its own module.
        std = self.config.initializer_range
        if isinstance(module, TokenGate):
            init.zeros_(module.weight)
            init.constant_(module.bias, module.initial_logit)
        elif isinstance(module, OutputProjection):
            init.normal_(module.weight, std=OUTPUT_SCALE * std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, ChannelConv):
            init.copy_(module.weight, module.initial_weight())
        elif isinstance(module, InitialWeights):
            module.reset_parameters()
        elif isinstance(module, TitansMixer):
            init.normal_(module.persistent, std=std)
            module.memory.tie_projections()  # after its projections, whose modules come first
        else:
            super()._init_weights(module)


class TitansModel(TitansPreTrainedModel):
    """Embeddings, decoder layers and the final norm."""

    def __init__(self, config: TitansConfig):
        check_config(config)
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(TitansDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm: nn.Module = TitansRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def init_parallel_plans(self) -> None:
        """Leaves in the tensor parallel plan the modules that this variant has."""
        super().init_parallel_plans()
        names = {re.sub(r"\.\d+\b", ".*", name) for name, _ in self.named_modules()}
        self._tp_plan: dict[str, str] = {name: style for name, style in self._tp_plan.items() if name in names}

    @merge_with_config_defaults
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TitansModelOutput:
        """Computes the hidden states of T new tokens per row.

        Args:
            input_ids (B, T) int64, or inputs_embeds (B, T, hidden): new tokens, at least one per row.
            attention_mask (B, T), or (B, columns read before + T): 1 at tokens, 0 at padding, in any column. Padding is
                removed: it neither counts as a token nor changes a state, and the output at padding is undefined.
            position_ids (B, T) or (1, T): needed only to mark packed documents, since the cache counts positions. A new
                document starts where they restart at 0 within a row.
            cache: the cache that the first token continues; after the call it holds each row's last document. It must
                have been made with the model's present weights: memory files are checked for that, calls are not.
            cu_seq_lens_q (N + 1,) int: cumulative lengths of the documents packed in a single row, from 0 to T.
            seq_idx (B, T) or (1, T) int: document of each token, which is independent of the documents before it.

        Returns last_hidden_state (B, T, hidden), cache; on request hidden_states; with `output_surprise=True` surprise,
        one `LayerSurprise` per layer; with `attn_implementation="eager"` attentions: one (B, heads, T, P + W) per
        layer, its columns the persistent tokens and the window up to the token, oldest first; in MAC (B, heads, T,
        P + 2 L): persistent tokens, recalled tokens and segment slots. Attention maps assembled from several windows or
        segments carry no gradient.

        Raises ValueError for an empty sequence or batch, ids out of range, and a mask, positions or a cache that do not
        fit.
        """
        check_inputs(input_ids, inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        cache = self._make_or_check_cache(cache, bool(use_cache), len(inputs_embeds))
        documents = {"position_ids": position_ids, "cu_seq_lens_q": cu_seq_lens_q, "seq_idx": seq_idx}
        learns = self.memory_learning if cache is None or cache.learning is None else cache.learning
        layout = TokenLayout.of_call(self.config, inputs_embeds, attention_mask, documents, cache, learns)
        if kwargs.pop("output_surprise", getattr(self.config, "output_surprise", False)):  # as `capture_outputs` does
            layout = layout._replace(grid=replace(layout.grid, needs_surprise=True))
        hidden_states = inputs_embeds
        with undone_on_error(cache):
            for layer in self.layers:
                hidden_states = layer(hidden_states, layout, cache=cache, **kwargs)
            hidden_states = self.norm(hidden_states)
        return TitansModelOutput(hidden_states, cache if use_cache else None)

    def _make_or_check_cache(self, cache: TitansCache | None, use_cache: bool, batch_size: int) -> TitansCache | None:
        """Returns `cache`, or a new one with `use_cache`; raises ValueError for a cache that does not fit."""
        if cache is None:
            return TitansCache(self.config) if use_cache else None
        check_cache_class("cache", cache)
        cache.check_fits(self.config, batch_size)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise ValueError(
                "`cache` cannot be used in training with gradient checkpointing: call model.eval() or give "
                "use_cache=False."
            )
        return cache


class TitansForCausalLM(TitansPreTrainedModel, TitansGenerationMixin):
    """Titans as a language model. The memory is updated with every token, in `generate()` too."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        self.model = TitansModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_surprise: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TitansCausalLMOutput:
        """Computes logits and, with labels, the loss; arguments beyond `TitansModel.forward`'s:

            labels (B, T) int64: usually `input_ids`; shifted inside, -100 is ignored. The loss is the mean cross
                entropy, or, with `num_items_in_batch`, the sum divided by it.
            logits_to_keep: compute logits only for the last n positions, or for the positions given; 0 for all.
            output_surprise: return the surprise of each token and its gates.
        Returns the loss if there are labels, logits (B, T or fewer, vocab_size), and the outputs of `TitansModel`.
        """
        with undone_on_error(cache):
            outputs = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                output_surprise=bool(output_surprise),
                cu_seq_lens_q=cu_seq_lens_q,
                seq_idx=seq_idx,
                **kwargs,
            )
            logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
            loss = None
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        kept = (outputs.cache, outputs.hidden_states, outputs.attentions, outputs.surprise)
        return TitansCausalLMOutput(loss, logits, *kept)


class TitansHead(TitansPreTrainedModel):
    """Base class of Transformers' generic heads, which create their base model by AutoModel."""

    accepts_loss_kwargs = False  # the losses are means over the batch, whatever number of items Trainer counts

    def __init__(self, config: TitansConfig):
        # AutoModel has no entry for the config class of a checkpoint that was loaded with its own code.
        AutoModel.register(type(config), TitansModel, exist_ok=True)
        super().__init__(config)


def leaving_cache_on_error(forward: Callable) -> Callable:
    """Makes a head's `forward` leave the cache as it was if it raises, for example for labels that do not fit."""

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @wraps(forward)
    def undone(self, *args, **kwargs):
        with undone_on_error(kwargs.get("cache", args[CACHE_PLACE] if len(args) > CACHE_PLACE else None)):
            return forward(self, *args, **kwargs)

    return undone


class TitansForSequenceClassification(GenericForSequenceClassification, TitansHead):
    """Classifies a text by its last token. A batch of several texts needs a mask, or `pad_token_id`."""

    @leaving_cache_on_error
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        """Computes the logits (B, labels) of the last token of each row, and, with labels (B,) or (B, labels), the loss
        that fits the config's `problem_type`; other arguments are as in `TitansModel.forward`.

        The last token is the last column whose mask is 1 and whose id is not `pad_token_id`. Transformers' own head
        looks at ids alone: it would classify the undefined output at padding that has other ids, or in embeddings.

        Raises ValueError for several rows of ids without a mask and without `pad_token_id`.
        """
        several = input_ids is not None and len(input_ids) > 1
        if several and attention_mask is None and self.config.pad_token_id is None:
            raise ValueError(
                "`attention_mask` must be given for several texts if the config has no `pad_token_id`: the ends of the "
                "texts are unknown."
            )
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        states, loss = outputs.last_hidden_state, None
        last = self._last_tokens(input_ids, attention_mask, states)
        logits = self.score(states[torch.arange(len(states), device=states.device), last])
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        kept = (outputs.cache, outputs.hidden_states, outputs.attentions)
        return SequenceClassifierOutputWithPast(loss, logits, *kept)

    def _last_tokens(self, input_ids: Tensor | None, attention_mask: Tensor | None, states: Tensor) -> Tensor:
        """Returns the column (B,) of the last token of each row of states (B, T, hidden); 0 in a row of padding."""
        real = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        if attention_mask is not None:
            real = attention_mask[:, attention_mask.shape[1] - states.shape[1] :].to(states.device) != 0
        if input_ids is not None and self.config.pad_token_id is not None:
            real = real & (input_ids.to(states.device) != self.config.pad_token_id)
        return (torch.arange(states.shape[1], device=states.device) * real).argmax(-1)


class TitansForTokenClassification(GenericForTokenClassification, TitansHead):
    """Classifies each token, given the tokens before it."""

    forward = leaving_cache_on_error(GenericForTokenClassification.forward)


class TitansForQuestionAnswering(GenericForQuestionAnswering, TitansHead):
    """Predicts the first and the last token of an answer."""

    @leaving_cache_on_error
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Computes start_logits and end_logits (B, T), and with start_positions and end_positions (B,) the loss; other
        arguments are as in `TitansModel.forward`.

        The logits at padding are the smallest number of their dtype: padding does not change a row's loss, and no
        answer lies in it.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits, loss = self.qa_outputs(outputs.last_hidden_state), None  # (B, T, 2)
        if attention_mask is not None:
            padding = attention_mask[:, attention_mask.shape[1] - logits.shape[1] :].to(logits.device) == 0
            logits = logits.masked_fill(padding[..., None], torch.finfo(logits.dtype).min)
        start_logits, end_logits = logits.unbind(-1)
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(loss, start_logits, end_logits, outputs.hidden_states, outputs.attentions)


TitansModel.register_for_auto_class("AutoModel")
TitansForCausalLM.register_for_auto_class("AutoModelForCausalLM")
TitansForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
TitansForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
TitansForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

__all__ = [
    "TitansForCausalLM",
    "TitansForQuestionAnswering",
    "TitansForSequenceClassification",
    "TitansForTokenClassification",
    "TitansModel",
    "TitansPreTrainedModel",
]

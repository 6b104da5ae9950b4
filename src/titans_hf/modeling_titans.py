"""Titans for Transformers: the four variants of section 4 of "Titans: Learning to Memorize at Test Time"."""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .cache_titans import TitansCache
from .configuration_titans import TitansConfig
from .input_checks import check_call, check_input_ids, check_not_packed, new_columns
from .mixers_titans import MIXERS, MAGMixer, TitansMixer
from .neural_memory import InitialWeights, TokenGate
from .token_grid import TokenGrid


class TitansMLP(nn.Module):
    """SwiGLU."""

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
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = MIXERS[config.variant](config, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = TitansMLP(config, layer_idx)

    def forward(self, hidden_states: Tensor, grid: TokenGrid, past_key_values: TitansCache | None = None) -> Tensor:
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        state = None if cache is None else cache.state
        mixed, _, state = self.mixer(self.mixer_norm(hidden_states), state, grid)
        hidden_states = hidden_states + mixed
        if cache is not None:
            cache.set(state, hidden_states.shape[1])
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class TitansPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation, as in every Transformers model."""

    config: TitansConfig
    config_class = TitansConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TitansDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": TitansDecoderLayer, "attentions": OutputRecorder(TitansMixer, index=1)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # In a class outside Transformers only modules that own a parameter are visited, so each one is set by its
        # owner.
        std = self.config.initializer_range
        if isinstance(module, TokenGate):
            init.zeros_(module.weight)
            init.constant_(module.bias, module.initial_logit)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:  # that of a head
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv1d):
            bound = module.kernel_size[0] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, InitialWeights):  # the memory starts by saying nothing
            *hidden, last = module.parameters()
            for weight in hidden:
                init.normal_(weight, std=weight.shape[-2] ** -0.5)
            init.zeros_(last)
        elif isinstance(module, TitansMixer):
            init.normal_(module.persistent, std=std)
            if isinstance(module, MAGMixer):
                for vector in (module.gate_attention, module.gate_memory, module.gate_bias):
                    init.zeros_(vector)


class TitansModel(TitansPreTrainedModel):
    """Embeddings, decoder layers and the last norm."""

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(TitansDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids (B, T) int64, or inputs_embeds (B, T, hidden): T new tokens, at least one.
            attention_mask (B, T), or (B, columns read before + T): 0 at padding, wherever it stands. Padding is left
                out: it neither counts nor changes a state, and the output there means nothing.
            position_ids: not needed, since positions restart in every window and segment; must not restart in a row.
            past_key_values: where to read on; updated. Made here if `use_cache`.

        Returns last_hidden_state (B, T, hidden), past_key_values; on request hidden_states and, with
        `attn_implementation="eager"`, attentions: one (B, heads, T, P + W) per layer, columns being the persistent
        tokens and the window up to the token, oldest first; in MAC (B, heads, T, P + 2 L): persistent tokens, recalled
        and segment slots.

        Raises ValueError for an empty sequence, ids out of range, a mask or cache that does not fit, packed documents.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            check_input_ids(input_ids, self.config.vocab_size)
            inputs_embeds = self.embed_tokens(input_ids)
        batch_size, num_tokens = inputs_embeds.shape[:2]
        if use_cache and past_key_values is None:
            past_key_values = TitansCache(self.config)
        check_call(self.config, batch_size, num_tokens, past_key_values)
        check_not_packed(position_ids, **kwargs)
        if past_key_values is not None and self.gradient_checkpointing and self.training:
            raise ValueError("`past_key_values` cannot be read on from in training with gradient checkpointing.")
        grid = self._grid(inputs_embeds, attention_mask, past_key_values)
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, grid, past_key_values=past_key_values)
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values if use_cache else None
        )

    def _grid(self, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: TitansCache | None) -> TokenGrid:
        """Where the tokens lie on each row's grid of chunks and segments."""
        batch_size, num_tokens = inputs_embeds.shape[:2]
        padding_mask = new_columns(
            attention_mask, batch_size, num_tokens, 0 if cache is None else cache.get_seq_length()
        )
        state = None if cache is None else cache.layers[0].state
        if padding_mask is None and (state is None or num_tokens == 1):
            return TokenGrid.whole(batch_size, num_tokens, inputs_embeds.device)
        num_seen = inputs_embeds.new_zeros(batch_size, dtype=torch.int64) if state is None else state.memory.num_seen
        return TokenGrid.build(num_seen.to(inputs_embeds.device), num_tokens, self.config.grid_unit, padding_mask)


class TitansForCausalLM(TitansPreTrainedModel, GenerationMixin):
    """Titans as a language model: in `generate()`, the memory goes on learning while it decodes."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        self.model = TitansModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """
        Args, beyond those of `TitansModel.forward`:
            labels (B, T) int64: usually `input_ids`; shifted inside, -100 is ignored. The loss is their mean cross
                entropy, or their sum over `num_items_in_batch` where given.
            logits_to_keep: the last n positions, or the positions given, get logits; 0 for all.

        Returns loss where there are labels, logits (B, T or fewer, vocab_size), and what `TitansModel` returns.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args) -> None:
        """Makes the cache of `generate()`: the only kind there is, already of constant size."""
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(f"`cache_implementation` must be None for a Titans model, but is {implementation!r}.")
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = TitansCache(self.config)


__all__ = ["TitansForCausalLM", "TitansModel", "TitansPreTrainedModel"]

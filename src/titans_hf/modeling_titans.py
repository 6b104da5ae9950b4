"""Titans for Transformers: the four variants of section 4 of "Titans: Learning to Memorize at Test Time"."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .cache_titans import TitansCache
from .configuration_titans import TitansConfig
from .generation_titans import TitansGenerationMixin
from .input_checks import check_call, check_input_ids
from .memory_chunk import compile_chunks
from .mixers_titans import MIXERS, MAGMixer, TitansMixer
from .neural_memory import ChannelConv, InitialWeights, TokenGate
from .packing import columns_of_call
from .surprise_titans import TitansCausalLMOutput, TitansModelOutput
from .token_grid import ALL_REAL, Columns, TokenGrid


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


class TitansCall(NamedTuple):
    """What all layers are told about a call.

    columns: of the tokens. grid: where they lie. unread: where those lie that a cropped cache has to read again first;
    None for none.
    """

    columns: Columns
    grid: TokenGrid
    unread: TokenGrid | None

    @classmethod
    def plan(
        cls, config: TitansConfig, inputs_embeds: Tensor, columns: Columns, cache: TitansCache | None
    ) -> "TitansCall":
        """For new tokens (B, T, hidden); `cache` None where nothing was read before."""
        layer = None if cache is None else cache.layers[0]
        (batch_size, num_tokens), device = inputs_embeds.shape[:2], inputs_embeds.device
        num_seen, unread = torch.zeros(batch_size, dtype=torch.int64, device=device), None
        fresh = layer is None or (layer.state is None and layer.unread is None)
        if fresh and columns == ALL_REAL:
            return cls(columns, TokenGrid.whole(batch_size, num_tokens, device), None)
        if layer is not None and layer.state is not None:
            num_seen = layer.state.memory.num_seen.to(device)
        if layer is not None and layer.unread is not None:
            again = Columns(layer.unread.real.to(device), layer.unread.begins.to(device))
            unread = TokenGrid.build(num_seen, layer.unread.num_columns, config.grid_unit, again)
            num_seen = unread.seen_after(num_seen)
        return cls(columns, TokenGrid.build(num_seen, num_tokens, config.grid_unit, columns), unread)


class TitansDecoderLayer(GradientCheckpointingLayer):
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = MIXERS[config.variant](config, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = TitansMLP(config, layer_idx)

    def forward(self, hidden_states: Tensor, call: TitansCall, past_key_values: TitansCache | None = None) -> Tensor:
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        state = None
        if cache is not None:
            if past_key_values.offloading:
                cache.prefetch()
            state = cache.state
        if call.unread is not None:  # by its forward: hooks that record attention see each token once
            state = self.mixer.forward(cache.unread.inputs, state, call.unread)[2]
        inputs = self.mixer_norm(hidden_states)
        mixed, _, after, _ = self.mixer(inputs, state, call.grid)
        if cache is not None:
            cache.advance(state, after, inputs, call.columns)
            if past_key_values.offloading:
                cache.offload()
        hidden_states = hidden_states + mixed
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
    _can_record_outputs = {
        "hidden_states": TitansDecoderLayer,
        "attentions": OutputRecorder(TitansMixer, index=1),
        "surprise": OutputRecorder(TitansMixer, index=3),
    }

    def compile_memory(self, **options) -> None:
        """Compiles what the memory does with a full chunk, when it next does it: for all Titans of the process,
        whatever the length of what they read, once for every size of a chunk and every number of heads times rows.

        `torch.compile(model)` compiles everything, but for each length anew: the chunks are a loop. `options` are those
        of torch.compile.
        """
        compile_chunks(**options)

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
        elif isinstance(module, ChannelConv):
            init.copy_(module.weight, module.initial_weight())
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
    ) -> TitansModelOutput:
        """
        Args:
            input_ids (B, T) int64, or inputs_embeds (B, T, hidden): T new tokens, at least one.
            attention_mask (B, T), or (B, columns read before + T): 0 at padding, wherever it stands. Padding is left
                out: it neither counts nor changes a state, and the output there means nothing.
            position_ids (B, T) or (1, T): not needed, since positions restart in every window and segment. Where they
                restart at 0 within a row, a new document begins, as do `seq_idx` (B, T) where it changes and
                `cu_seq_lens_q` (N + 1,) in a single row: nothing of the one before is seen. The first token of a call
                goes on from the cache, which is left with each row's last document.
            past_key_values: where to read on; updated. Made here if `use_cache`.

        Returns last_hidden_state (B, T, hidden), past_key_values; on request hidden_states; with
        `output_surprise=True` surprise, one `LayerSurprise` per layer; with `attn_implementation="eager"` attentions:
        one (B, heads, T, P + W) per layer, columns being the persistent tokens and the window up to the token, oldest
        first; in MAC (B, heads, T, P + 2 L): persistent tokens, recalled and segment slots.

        Raises ValueError for an empty sequence, ids out of range, a mask, positions or cache that do not fit.
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
        if past_key_values is not None and self.gradient_checkpointing and self.training:
            raise ValueError("`past_key_values` cannot be read on from in training with gradient checkpointing.")
        columns = columns_of_call(batch_size, num_tokens, attention_mask, position_ids, past_key_values, kwargs)
        call = TitansCall.plan(self.config, inputs_embeds, columns, past_key_values)
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, call, past_key_values=past_key_values)
        return TitansModelOutput(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values if use_cache else None
        )


class TitansForCausalLM(TitansPreTrainedModel, TitansGenerationMixin):
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
        output_surprise: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TitansCausalLMOutput:
        """
        Args, beyond those of `TitansModel.forward`:
            labels (B, T) int64: usually `input_ids`; shifted inside, -100 is ignored. The loss is their mean cross
                entropy, or their sum over `num_items_in_batch` where given.
            logits_to_keep: the last n positions, or the positions given, get logits; 0 for all.
            output_surprise: return how much each token taught the memory, and with which gates.

        Returns loss where there are labels, logits (B, T or fewer, vocab_size), and what `TitansModel` returns.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_surprise=output_surprise,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return TitansCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            surprise=outputs.surprise,
        )


TitansModel.register_for_auto_class("AutoModel")
TitansForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["TitansForCausalLM", "TitansModel", "TitansPreTrainedModel"]

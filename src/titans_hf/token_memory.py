"""The token memory: learns at test time which token follows which hidden state, and is read before the LM head.

A linear memory by the delta rule (paper section 3.1, without momentum) behind the last layer. With the final hidden
states h_t and the embeddings e_t of the tokens, both normalised to length 1:

    k_t = phi(h_{t-1}),  q_t = phi(h_t),  v_t = e_t,    phi(h) = f / |f|,  f = max(0, h Omega - 1.5)
    M_t = (1 - alpha_t) M_{t-1} - theta_t grad |M_{t-1}(k_t) - v_t|^2,  M_0 = 0    (eq. 10-13 without momentum)
    output_t = scale o 2 sigmoid(w h_t + b) M_t(q_t)                               (added to the LM head's input)

The directions Omega (D, F) are random and not trained. A write overwrites the value that is stored in its key's
direction: with many sparse features the keys of a long text have few directions in common. The LM head's weights are
the embeddings, so that the retrieved value, a mixture of embeddings, raises the logits of its tokens from the first
training step on.

An extension beyond the paper.
Shapes: R rows of the grid, G slots, F features, D hidden size.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, relu
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import maybe_autocast

from .cache_layer import LayerState
from .cache_titans import TitansCache
from .configuration_titans import TitansConfig
from .memory_network import UpdateRule
from .memory_ops import memorize_on_grid
from .memory_state import Gates, MemoryInputs, MemoryState, zero_of
from .mixers_titans import MixerOutput, SequenceMixer
from .neural_memory import TokenGate, is_updated, l2_normalize
from .token_grid import TokenLayout

RULE = UpdateRule(error_clip=None, delta_rule=True)
MAX_LR = 0.5  # of theta: a step of 1/2 replaces the value that the memory returns for a key
THRESHOLD = 1.5  # of the features: 1 in 15 exceeds it, as they are standard normal before


class TokenMemory(SequenceMixer):
    """Retrieves embeddings of tokens that may come next, (B, T, hidden), from hidden states and embeddings of the
    tokens, side by side: (B, T, 2 * hidden).
    """

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(layer_idx, 2 * config.hidden_size)
        self.config = config
        size = config.hidden_size
        self.register_buffer("directions", torch.empty(size, config.token_memory_features))
        self.inner_lr = TokenGate(size, 1, initial_logit=0.0)  # theta
        self.forget = TokenGate(size, 1, initial_logit=-7.0) if config.memory_forget else None  # alpha
        self.output_gate = TokenGate(size, 1, initial_logit=0.0)
        self.scale = nn.Parameter(torch.ones(size))
        self.reset_parameters()

    def reset_parameters(self, init=nn.init) -> None:
        """Initialises with the functions of `init`."""
        init.normal_(self.directions)
        init.ones_(self.scale)

    def initial_state(self, batch_size: int, dtype: torch.dtype) -> LayerState:
        """Returns the state before the first token: a memory of zeros; conv_state (B, 1, hidden): the hidden state of
        the token before, zeros.
        """
        memory_dtype, size = torch.promote_types(dtype, torch.float32), self.config.hidden_size
        weights = self.scale.new_zeros(1, self.config.token_memory_features, size, dtype=memory_dtype)
        memory = MemoryState.initial([weights], batch_size, memory_dtype, has_anchor=False, has_momentum=False)
        return LayerState(memory, self.scale.new_zeros(batch_size, 1, size, dtype=dtype))

    def features(self, hidden_states: Tensor) -> Tensor:
        """Computes phi(h): (..., D) -> (..., F)."""
        directions = self.directions.to(hidden_states.dtype)
        return l2_normalize(relu(l2_normalize(hidden_states) @ directions - THRESHOLD))  # (..., D) @ (D, F)

    def mix(self, inputs, state, grid, **kwargs):
        hidden_states, embeddings = inputs.chunk(2, dim=-1)
        extended = grid.prepend(state.conv_state.to(hidden_states.dtype), hidden_states)
        conv_state = grid.last_entries(extended, 1)
        with maybe_autocast(inputs.device.type, enabled=False):
            dtype, updates = state.memory.weights[0].dtype, is_updated(self.config, grid)
            phi = self.features(extended.to(dtype))[:, None]  # (R, 1, 1 + G, F), from the token before the first on
            values = l2_normalize(embeddings.to(dtype))[:, None]
            gates = self._gates(hidden_states, dtype, updates)
            memory_inputs = MemoryInputs(phi[:, :, 1:], phi[:, :, :-1], values, *gates)
            # "fla" is meant for the layers: here, more features than the kernel takes are no error.
            kernel = "torch" if self.config.memory_kernel == "torch" else "auto"
            options = {"chunk_size": self.config.memory_chunk_size, "kernel": kernel, "updates": updates}
            # M_t(q_t) (R, 1, G, D)
            retrieved, surprise, memory = memorize_on_grid(memory_inputs, state.memory, RULE, grid, **options)
            strength = 2 * torch.sigmoid(self.output_gate(hidden_states).to(dtype))
            output = self.scale.to(dtype) * strength * retrieved[:, 0]
        state = LayerState(memory, conv_state)
        return MixerOutput(output.to(hidden_states.dtype), None, state, [(surprise, gates)])

    def _gates(self, hidden_states: Tensor, dtype: torch.dtype, updates: bool) -> Gates:
        """Computes theta and log(1 - alpha), (R, 1, G) each; both are 0 unless the memory is updated."""
        inner_lr = (MAX_LR if updates else 0.0) * torch.sigmoid(self.inner_lr(hidden_states).to(dtype)).mT
        log_retain = torch.zeros_like(inner_lr)
        if self.forget is not None:
            logits = self.forget(hidden_states).to(dtype).mT
            log_retain = logsigmoid(-logits) if updates else log_retain + zero_of(logits)
        return Gates(inner_lr, None, log_retain)


class TitansTokenMemoryLayer(GradientCheckpointingLayer):
    """Adds the output of the token memory to the final hidden states."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.mixer = TokenMemory(config, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        embeddings: Tensor,
        layout: TokenLayout,
        cache: TitansCache | None = None,
    ) -> Tensor:
        """Computes the hidden states for the LM head from the final norm's output and the tokens' embeddings,
        (B, T, hidden) each, and updates its part of the cache.
        """
        inputs = torch.cat([hidden_states, embeddings], dim=-1)
        return hidden_states + self.mixer(inputs, layout, cache=cache).hidden_states

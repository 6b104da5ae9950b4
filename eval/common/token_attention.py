"""Attention over tokens in the token memory's place: the gain of a memory that loses nothing.

The token memory writes pairs of a hidden state and the token that followed into one matrix of fixed size. Here all
pairs are kept, and a softmax over the cosines of hidden states reads them: a pointer cache (arXiv 1612.04426) that is
trained with the model. With the final hidden states h_t and the tokens' embeddings e_t, all of length 1:

    output_t = scale o 2 sigmoid(w h_t + b) sum_j softmax_j(s h_t . h_{j-1}) e_j    (j <= t, j > t - window)
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad, scaled_dot_product_attention
from transformers.utils.generic import maybe_autocast

from titans_hf.neural_memory import TokenGate

SHARPNESS = 20.0  # s at first: the sharpness of a pointer cache that gained most without training


class TokenAttention(nn.Module):
    """Adds to the final hidden states what attention over all earlier tokens, or the last `window`, retrieves."""

    def __init__(self, hidden_size: int, window: int | None):
        super().__init__()
        self.window = window
        self.log_sharpness = nn.Parameter(torch.tensor(math.log(SHARPNESS)))
        self.output_gate = TokenGate(hidden_size, 1, initial_logit=0.0)
        self.scale = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states: Tensor, embeddings: Tensor) -> Tensor:
        """Computes the hidden states for the LM head, (B, T, hidden), of whole sequences without padding."""
        with maybe_autocast(hidden_states.device.type, enabled=False):
            states = normalize(hidden_states.float(), dim=-1)
            keys = pad(states[:, :-1], (0, 0, 1, 0))
            queries, values = self.log_sharpness.exp() * states, normalize(embeddings.float(), dim=-1)
            retrieved = attend(queries, keys, values, self.window)
            strength = 2 * torch.sigmoid(self.output_gate(hidden_states))
            output = self.scale * strength * retrieved
        return hidden_states + output.to(hidden_states.dtype)


def attend(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Computes causal attention, (B, T, d) each, over all tokens or over the last `window`, block by block."""
    if window is None:
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=1.0)
    batch, length, size = queries.shape
    queries, keys, values = (pad(x, (0, 0, window, -length % window)) for x in (queries, keys, values))
    queries, keys, values = (x.view(batch, -1, window, size) for x in (queries, keys, values))
    keys, values = (torch.cat([x[:, :-1], x[:, 1:]], dim=2) for x in (keys, values))  # a block and the one before
    position = torch.arange(window, device=queries.device)
    offset = position[:, None] + window - torch.arange(2 * window, device=queries.device)  # of a key before its query
    seen = ((offset >= 0) & (offset < window)).expand(batch, keys.shape[1], -1, -1).clone()
    seen[:, 0, :, :window] = False  # before the first token
    attended = scaled_dot_product_attention(queries[:, 1:], keys, values, attn_mask=seen, scale=1.0)
    return attended.reshape(batch, -1, size)[:, :length]

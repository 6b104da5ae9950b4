"""A memory of tokens behind the last layer of any causal language model, trained with it; whole sequences, no cache."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from titans_hf import TitansConfig
from titans_hf.cache_titans import CACHE_NAMES
from titans_hf.token_layout import TokenLayout
from titans_hf.token_memory import TitansTokenMemoryLayer

FEATURES, CHUNK_SIZE = 512, 64  # of the token memory, as in the published runs of MAG


class TokenMemoryLayer(nn.Module):
    """Adds to the final hidden states what Titans' token memory retrieves; the memory is empty before each sequence."""

    def __init__(self, hidden_size: int):
        super().__init__()
        fields = {"hidden_size": hidden_size, "num_attention_heads": 1, "memory_chunk_size": CHUNK_SIZE}
        self.config = TitansConfig(**fields, memory_form="delta", token_memory_features=FEATURES)
        self.layer = TitansTokenMemoryLayer(self.config, 0)

    def forward(self, hidden_states: Tensor, embeddings: Tensor) -> Tensor:
        """Computes the hidden states for the LM head, (B, T, hidden), of whole sequences without padding."""
        layout = TokenLayout.of_call(self.config, embeddings, None, {}, None)
        return self.layer(hidden_states, embeddings, layout)


def put_behind_last_layer(model: PreTrainedModel, memory: nn.Module) -> None:
    """Lets the LM head read memory(final hidden states, embeddings of the tokens), (B, T, hidden) each.

    A call with a cache raises ValueError.
    """
    embed = model.get_input_embeddings()

    def read_memory(_base: nn.Module, args: tuple, kwargs: dict[str, Any], output: ModelOutput) -> None:
        if any(output.get(name) is not None for name in (*CACHE_NAMES, "cache_params")):  # the last is Mamba's
            raise ValueError("use_cache must be False: a memory behind the last layer keeps no cache")
        input_ids = args[0] if args else kwargs["input_ids"]
        output.last_hidden_state = memory(output.last_hidden_state, embed(input_ids))

    model.base_model.memory_behind_last_layer = memory
    model.base_model.register_forward_hook(read_memory, with_kwargs=True)

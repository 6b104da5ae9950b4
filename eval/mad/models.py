"""The models of MAD: two blocks of a mixer and a SwiGLU MLP, width 128, as language models or as an auto-encoder."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from eval.common.compared_models import VARIANTS, check_fields, make_config, named_errors, start_like_titans
from eval.mad.tasks import Settings

BASELINES = ("llama", "mamba2", "gated-deltanet")
NAMES = (*VARIANTS, *BASELINES, *(f"{name}-late" for name in BASELINES))  # late: they start as Titans do
MLP_SIZE, MAMBA_LAYERS = 512, 4
SHAPE = {"num_hidden_layers": 2, "pad_token_id": None, "tie_word_embeddings": False, "use_cache": False}
ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 16}  # of 8, as in the attention baseline of MAD
STATE = {  # 4,096 numbers per layer: 4 heads of 32 by 32, and 256 channels by 16
    **dict.fromkeys(VARIANTS, ATTENTION | {"memory_num_heads": 4}),
    "llama": ATTENTION,
    "mamba2": {"state_size": 16, "chunk_size": 32},
    "gated-deltanet": {},
}


def config_of(name: str, vocab_size: int, settings: dict[str, Any]) -> PreTrainedConfig:
    """Makes the config of a model; `settings` replace its fields. Raises ValueError for unknown ones."""
    name = name.removesuffix("-late")
    shape = {"vocab_size": vocab_size} | SHAPE | STATE[name]
    free = MAMBA_LAYERS if name == "mamba2" else MLP_SIZE
    check_fields(f"the config of {name}", make_config(name, free, shape), settings)
    with named_errors(f"--set for {name}"):
        return make_config(name, free, shape | settings)


class AutoEncoder(nn.Module):
    """A model whose last output, with a position, is decoded into the token at that position by a SwiGLU MLP."""

    def __init__(self, config: PreTrainedConfig, length: int):
        super().__init__()
        self.encoder = AutoModel.from_config(config, dtype=torch.float32)
        width = config.hidden_size
        self.positions = nn.Parameter(torch.randn(length, width))
        self.gate_up = nn.Linear(width, 2 * MLP_SIZE, bias=False)
        self.down = nn.Linear(MLP_SIZE, width, bias=False)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        """Decodes the last output of input_ids (B, T) to logits (B, T, vocab_size)."""
        last = self.encoder(input_ids=input_ids).last_hidden_state[:, -1:]
        x = last + self.positions[: input_ids.shape[1]]
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        x = x + self.down(nn.functional.silu(gate) * up)
        return CausalLMOutput(logits=self.head(self.norm(x)))


def build(name: str, config: PreTrainedConfig, settings: Settings, auto_encoder: bool) -> nn.Module:
    """Builds a model with random weights, with a decoder of single tokens if `auto_encoder`."""
    if auto_encoder:
        model = AutoEncoder(config, settings.length)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if name.endswith("-late"):
        start_like_titans(model)
    return model

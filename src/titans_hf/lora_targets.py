"""The projections that PEFT adapts by default, so that `LoraConfig()` needs no `target_modules`."""

try:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS_BY_MODEL_TYPE
except ImportError:  # PEFT is optional
    TARGETS_BY_MODEL_TYPE = {}

# Of the attention and of the memory: both have queries, keys, values and an output projection of these names.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def register_lora_targets(model_type: str) -> None:
    """Makes LORA_TARGETS the default of PEFT for `model_type`, unless PEFT has a default for it."""
    TARGETS_BY_MODEL_TYPE.setdefault(model_type, LORA_TARGETS)

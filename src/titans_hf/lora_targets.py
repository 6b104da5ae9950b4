"""The projections that PEFT adapts by default: `LoraConfig()` without target_modules works where PEFT is installed."""

try:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS_BY_MODEL_TYPE
except ImportError:  # adapters are optional
    TARGETS_BY_MODEL_TYPE = {}

# Those of the attention and of the memory: a memory stores k and v, is asked by q, and is read through o.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def register_lora_targets(model_type: str) -> None:
    """Makes LORA_TARGETS PEFT's default for `model_type`, where it has none yet."""
    TARGETS_BY_MODEL_TYPE.setdefault(model_type, LORA_TARGETS)

"""Titans ("Learning to Memorize at Test Time", arXiv 2501.00663) for Hugging Face Transformers.

Importing this package registers the model with AutoConfig, AutoModel and the AutoModelFor... class of every head.
"""

from typing import TYPE_CHECKING

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTimeSeriesPrediction,
    AutoModelForTokenClassification,
)

from .cache_titans import TitansCache
from .configuration_titans import TitansConfig
from .memory_deep import deep_rule
from .memory_rule import delta_rule
from .memory_state import MemoryState
from .modeling_titans import (
    TitansForCausalLM,
    TitansForQuestionAnswering,
    TitansForSequenceClassification,
    TitansForTokenClassification,
    TitansModel,
    TitansPreTrainedModel,
)
from .neural_memory import NeuralMemory
from .remember import MemoryCache, RememberConfig, RememberForCausalLM, fit_memory, forget, remembering, save_adapter
from .time_series_titans import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig

if TYPE_CHECKING:
    from .remember import remember  # the package itself can be called

AutoConfig.register("titans", TitansConfig)
AutoModel.register(TitansConfig, TitansModel)
AutoModelForCausalLM.register(TitansConfig, TitansForCausalLM)
AutoConfig.register("remember", RememberConfig)
AutoModelForCausalLM.register(RememberConfig, RememberForCausalLM)
AutoModelForQuestionAnswering.register(TitansConfig, TitansForQuestionAnswering)
AutoModelForSequenceClassification.register(TitansConfig, TitansForSequenceClassification)
AutoModelForTokenClassification.register(TitansConfig, TitansForTokenClassification)
AutoConfig.register("titans_time_series", TitansTimeSeriesConfig)
AutoModelForTimeSeriesPrediction.register(TitansTimeSeriesConfig, TitansForTimeSeriesPrediction)

__version__ = "0.1.0"
__all__ = [
    "MemoryCache",
    "MemoryState",
    "NeuralMemory",
    "TitansCache",
    "TitansConfig",
    "TitansForCausalLM",
    "TitansForQuestionAnswering",
    "TitansForSequenceClassification",
    "TitansForTimeSeriesPrediction",
    "TitansForTokenClassification",
    "TitansModel",
    "TitansPreTrainedModel",
    "TitansTimeSeriesConfig",
    "deep_rule",
    "delta_rule",
    "fit_memory",
    "forget",
    "remember",
    "remembering",
    "save_adapter",
]

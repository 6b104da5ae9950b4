"""Titans ("Learning to Memorize at Test Time", arXiv 2501.00663) for Hugging Face Transformers.

Importing this package registers the model with AutoConfig, AutoModel and the AutoModelFor... class of every head.
"""

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
from .recalling import MemoryCache, Passages, forget, remember, remembering
from .time_series_titans import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig

AutoConfig.register("titans", TitansConfig)
AutoModel.register(TitansConfig, TitansModel)
AutoModelForCausalLM.register(TitansConfig, TitansForCausalLM)
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
    "Passages",
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
    "forget",
    "remember",
    "remembering",
]

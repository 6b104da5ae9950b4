"""Titans with Transformers' own heads: what a text is, what each token is, and where in it an answer stands."""

from transformers import AutoModel
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from .configuration_titans import TitansConfig
from .modeling_titans import TitansModel, TitansPreTrainedModel

AutoModel.register(TitansConfig, TitansModel, exist_ok=True)  # the heads make their body through it


class TitansForSequenceClassification(GenericForSequenceClassification, TitansPreTrainedModel):
    """One label a text, from its last token: the one that has read all the others. Give `pad_token_id` to batch."""


class TitansForTokenClassification(GenericForTokenClassification, TitansPreTrainedModel):
    """One label a token; a token knows those before it only."""


class TitansForQuestionAnswering(GenericForQuestionAnswering, TitansPreTrainedModel):
    """The first and the last token of the answer."""


__all__ = ["TitansForQuestionAnswering", "TitansForSequenceClassification", "TitansForTokenClassification"]

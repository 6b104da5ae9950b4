"""Titans with Transformers' own heads: what a text is, what each token is, and where in it an answer stands."""

from transformers import AutoModel
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from .configuration_titans import TitansConfig
from .modeling_titans import TitansModel, TitansPreTrainedModel


class TitansHead(TitansPreTrainedModel):
    def __init__(self, config: TitansConfig):
        # The generic heads make their body through AutoModel, which does not know a config that came with a checkpoint.
        AutoModel.register(type(config), TitansModel, exist_ok=True)
        super().__init__(config)


class TitansForSequenceClassification(GenericForSequenceClassification, TitansHead):
    """One label a text, from its last token: the one that has read all the others. Give `pad_token_id` to batch."""


class TitansForTokenClassification(GenericForTokenClassification, TitansHead):
    """One label a token; a token knows those before it only."""


class TitansForQuestionAnswering(GenericForQuestionAnswering, TitansHead):
    """The first and the last token of the answer."""


TitansForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
TitansForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
TitansForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

__all__ = ["TitansForQuestionAnswering", "TitansForSequenceClassification", "TitansForTokenClassification"]

"""The heads that classify texts and tokens and that find answers: Transformers' generic ones on a `TitansModel`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from .cache_titans import undone_on_error
from .configuration_titans import TitansConfig
from .modeling_titans import TitansModel, TitansPreTrainedModel

ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "past_key_values")  # of each head, in this order


class TitansHead(TitansPreTrainedModel):
    """Base class of Transformers' generic heads, which create their base model by AutoModel."""

    accepts_loss_kwargs = False  # the losses are means over the batch, whatever number of items Trainer counts

    def __init__(self, config: TitansConfig):
        # AutoModel has no entry for the config class of a checkpoint that was loaded with its own code.
        AutoModel.register(type(config), TitansModel, exist_ok=True)
        super().__init__(config)


def _argument(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Returns one of `ARGUMENTS` of a call, None where it is not given."""
    place = ARGUMENTS.index(name)
    return kwargs.get(name, args[place] if len(args) > place else None)


def leaving_cache_on_error(forward: Callable) -> Callable:
    """Makes a head's `forward` leave the cache as it was if it raises, as for labels that do not fit."""

    @wraps(forward)
    def undone(self, *args, **kwargs):
        with undone_on_error(_argument("past_key_values", args, kwargs)):
            return forward(self, *args, **kwargs)

    return undone


class TitansForSequenceClassification(GenericForSequenceClassification, TitansHead):
    """Classifies a text by its last token. A batch of several texts needs `pad_token_id`."""

    @leaving_cache_on_error
    @wraps(GenericForSequenceClassification.forward)
    def forward(self, *args, **kwargs):
        """Classifies texts; ids where the mask is 0 count as `pad_token_id`, by which Transformers finds a text's end.

        Raises ValueError for padding at the end where that is unknown: the last column would be classified.
        """
        ids, mask = (_argument(name, args, kwargs) for name in ("input_ids", "attention_mask"))
        if isinstance(mask, Tensor) and mask.dim() == 2:
            if ids is None or self.config.pad_token_id is None:
                _check_last_column(mask)
            elif len(ids) == len(mask) and ids.shape[1] <= mask.shape[1]:  # the model refuses others
                padding = mask[:, mask.shape[1] - ids.shape[1] :].to(ids.device) == 0
                kwargs["input_ids"] = ids.masked_fill(padding, self.config.pad_token_id)
                if args:
                    args = (kwargs.pop("input_ids"), *args[1:])
        return super().forward(*args, **kwargs)


class TitansForTokenClassification(GenericForTokenClassification, TitansHead):
    """Classifies each token, given the tokens before it."""

    forward = leaving_cache_on_error(GenericForTokenClassification.forward)


class TitansForQuestionAnswering(GenericForQuestionAnswering, TitansHead):
    """Predicts the first and the last token of an answer."""

    forward = leaving_cache_on_error(GenericForQuestionAnswering.forward)


def _check_last_column(mask: Tensor) -> None:
    """Raises ValueError for a mask (B, T) that is 0 in the last column, by which Transformers classifies."""
    if not torch.compiler.is_compiling() and not mask[:, -1].all():
        raise ValueError(
            "`attention_mask` must be 1 in its last column without `pad_token_id` in the config, and with "
            "`inputs_embeds`: a text is classified by its last column. Pad on the left."
        )


TitansForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
TitansForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
TitansForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

__all__ = ["TitansForQuestionAnswering", "TitansForSequenceClassification", "TitansForTokenClassification"]

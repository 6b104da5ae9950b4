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
        """Raises ValueError where Transformers would classify a text by a column of padding."""
        ids, mask = (_argument(name, args, kwargs) for name in ("input_ids", "attention_mask"))
        if isinstance(mask, Tensor) and mask.dim() == 2 and not torch.compiler.is_compiling():
            _check_judged_columns(ids, mask, self.config.pad_token_id)
        return super().forward(*args, **kwargs)


class TitansForTokenClassification(GenericForTokenClassification, TitansHead):
    """Classifies each token, given the tokens before it."""

    forward = leaving_cache_on_error(GenericForTokenClassification.forward)


class TitansForQuestionAnswering(GenericForQuestionAnswering, TitansHead):
    """Predicts the first and the last token of an answer."""

    forward = leaving_cache_on_error(GenericForQuestionAnswering.forward)


def _check_judged_columns(ids: Tensor | None, mask: Tensor, pad_token_id: int | None) -> None:
    """Raises ValueError if the column by which Transformers judges a text is 0 in its mask: the last one, or that of
    the last id other than `pad_token_id`, where that and the ids are known.
    """
    if ids is None or pad_token_id is None:
        if not mask[:, -1].all():
            raise ValueError(
                "`attention_mask` must be 1 in its last column without `pad_token_id` in the config, and with "
                "`inputs_embeds`: a text is classified by its last column. Pad on the left."
            )
        return
    if len(ids) != len(mask) or ids.shape[1] > mask.shape[1]:
        return  # the model refuses this mask
    new = mask[:, -ids.shape[1] :].to(ids.device) != 0
    judged = (torch.arange(ids.shape[1], device=ids.device) * (ids != pad_token_id)).argmax(-1, keepdim=True)
    if not (new.gather(1, judged)[:, 0] | ~new.any(1)).all():
        raise ValueError(
            f"`input_ids` must be `pad_token_id` ({pad_token_id}) where `attention_mask` is 0 after a text, but are "
            "others: a text is classified by its last id that is not `pad_token_id`."
        )


TitansForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
TitansForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
TitansForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

__all__ = ["TitansForQuestionAnswering", "TitansForSequenceClassification", "TitansForTokenClassification"]

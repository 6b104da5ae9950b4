"""The heads that classify texts and tokens and that find answers: Transformers' generic ones on a `TitansModel`."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from transformers import AutoModel
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import QuestionAnsweringModelOutput, SequenceClassifierOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .cache_titans import TitansCache, rename_cache, takes_either_name, undone_on_error
from .configuration_titans import TitansConfig
from .modeling_titans import TitansModel, TitansPreTrainedModel

PLACE = 3  # of the cache among the arguments of a generic head


class TitansHead(TitansPreTrainedModel):
    """Base class of Transformers' generic heads, which create their base model by AutoModel."""

    accepts_loss_kwargs = False  # the losses are means over the batch, whatever number of items Trainer counts

    def __init__(self, config: TitansConfig):
        # AutoModel has no entry for the config class of a checkpoint that was loaded with its own code.
        AutoModel.register(type(config), TitansModel, exist_ok=True)
        super().__init__(config)


def leaving_cache_on_error(forward: Callable) -> Callable:
    """Makes a head's `forward` leave the cache as it was if it raises, as for labels that do not fit."""

    @wraps(forward)
    def undone(self, *args, **kwargs):
        with undone_on_error(rename_cache(kwargs).get("cache", args[PLACE] if len(args) > PLACE else None)):
            return forward(self, *args, **kwargs)

    return undone


class TitansForSequenceClassification(GenericForSequenceClassification, TitansHead):
    """Classifies a text by its last token. A batch of several texts needs a mask, or `pad_token_id`."""

    @takes_either_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        """Computes the logits (B, labels) of the last token of each row, and, with labels (B,) or (B, labels), the loss
        that fits the config's `problem_type`; other arguments are those of `TitansModel.forward`.

        The last token is the last column whose mask is 1 and whose id is not `pad_token_id`. Transformers' own head
        looks at ids alone: it would classify the undefined output at padding with other ids or of embeddings.

        Raises ValueError for several rows of ids without a mask and without `pad_token_id`.
        """
        several = input_ids is not None and len(input_ids) > 1
        if several and attention_mask is None and self.config.pad_token_id is None:
            raise ValueError(
                "`attention_mask` must be given for several texts if the config has no `pad_token_id`: the ends of the "
                "texts are unknown."
            )
        with undone_on_error(cache):
            outputs = self.model(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
            states, loss = outputs.last_hidden_state, None
            last = self._last_tokens(input_ids, attention_mask, states)
            logits = self.score(states[torch.arange(len(states), device=states.device), last])
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        kept = (outputs.cache, outputs.hidden_states, outputs.attentions)
        return SequenceClassifierOutputWithPast(loss, logits, *kept)

    def _last_tokens(self, input_ids: Tensor | None, attention_mask: Tensor | None, states: Tensor) -> Tensor:
        """Returns the column (B,) of the last token of each row of states (B, T, hidden); 0 in a row of padding."""
        real = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        if attention_mask is not None:
            real = attention_mask[:, attention_mask.shape[1] - states.shape[1] :].to(states.device) != 0
        if input_ids is not None and self.config.pad_token_id is not None:
            real = real & (input_ids.to(states.device) != self.config.pad_token_id)
        return (torch.arange(states.shape[1], device=states.device) * real).argmax(-1)


class TitansForTokenClassification(GenericForTokenClassification, TitansHead):
    """Classifies each token, given the tokens before it."""

    forward = leaving_cache_on_error(GenericForTokenClassification.forward)


class TitansForQuestionAnswering(GenericForQuestionAnswering, TitansHead):
    """Predicts the first and the last token of an answer."""

    @takes_either_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Computes start_logits and end_logits (B, T), and with start_positions and end_positions (B,) the loss; other
        arguments are those of `TitansModel.forward`.

        The logits of padding are the least number of their dtype: the loss of a row is the same however far the row is
        padded, and no answer lies in padding.
        """
        with undone_on_error(cache):
            outputs = self.model(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
            logits, loss = self.qa_outputs(outputs.last_hidden_state), None  # (B, T, 2)
            if attention_mask is not None:
                padding = attention_mask[:, attention_mask.shape[1] - logits.shape[1] :].to(logits.device) == 0
                logits = logits.masked_fill(padding[..., None], torch.finfo(logits.dtype).min)
            start_logits, end_logits = logits.unbind(-1)
            if start_positions is not None and end_positions is not None:
                loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(loss, start_logits, end_logits, outputs.hidden_states, outputs.attentions)


TitansForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
TitansForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
TitansForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

__all__ = ["TitansForQuestionAnswering", "TitansForSequenceClassification", "TitansForTokenClassification"]

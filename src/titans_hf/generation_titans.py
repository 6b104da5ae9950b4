"""Adapts `generate()` to Titans: its cache and its masks."""

import copy
from functools import wraps

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, GenerationMixin, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg

from .cache_titans import TitansCache, check_cache_class
from .token_grid import check_not_empty

logger = logging.get_logger(__name__)


class FinishedRows(StoppingCriteriaList):
    """The stopping criteria of a `generate()` call, which remember the rows that have ended.

    rows: (B,) bool, True in rows to which Transformers appends padding from now on; None if it never does.
    reads_no_padding: True once the prompt is read, if no row gets padding: a step then needs no mask.
    without_mask: True if no attention_mask was given (all ones).
    """

    def __init__(self, criteria: StoppingCriteriaList, input_ids: Tensor, without_mask: bool, fixed_length: bool):
        """`fixed_length`: no text can end before the last token."""
        super().__init__(criteria)
        self.without_mask = without_mask
        pads = len(input_ids) > 1 and any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        if fixed_length:  # Transformers' exporter: a mask would be one more input of the step
            pads = pads and any(type(criterion) not in (EosTokenCriteria, MaxLengthCriteria) for criterion in criteria)
        self.rows = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device) if pads else None
        self.reads_no_padding = False

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        self.reads_no_padding = self.rows is None  # from the first generated token on
        ended = super().__call__(input_ids, scores, **kwargs)
        self.rows = None if self.rows is None else self.rows | ended
        return ended

    def masked(self, mask: Tensor | None) -> Tensor | None:
        """Sets the last column of the mask (B, columns) to 0 in rows that have ended. Without a mask, returns that
        column.
        """
        if self.rows is None:
            return mask
        if mask is None:
            return (~self.rows).long()[:, None]
        mask[:, -1] = ~self.rows  # Transformers has just appended it, to a new tensor
        return mask


class EndedRowsMixin(GenerationMixin):
    """`generate()` that does not read the padding after the end of a row.

    Two private methods of Transformers are overridden, because no public one is called at these places: where rows end
    (`_sample`), and where a step's mask grows (`_update_model_kwargs_for_generation`).
    """

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        """Samples or decodes greedily, and notes which rows have ended."""
        least, most = generation_config.min_new_tokens, generation_config.max_new_tokens
        fixed_length = None not in (least, most) and least >= most
        finished = FinishedRows(stopping_criteria, input_ids, kwargs.get("attention_mask") is None, fixed_length)
        return super()._sample(
            input_ids, logits_processor, finished, generation_config, finished_rows=finished, **kwargs
        )

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # Transformers reads the arguments' names
    def prepare_inputs_for_generation(self, *args, finished_rows: FinishedRows | None = None, **kwargs) -> dict:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if finished_rows is not None and finished_rows.reads_no_padding and inputs.get("cache") is not None:
            inputs.pop("attention_mask", None)
        return inputs

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs: dict, *args, **kwargs) -> dict:
        """Adds the next token's column to the mask: 0 in rows that have ended."""
        finished = model_kwargs.get("finished_rows")
        if finished is not None and finished.without_mask:  # the mask made here has only one column
            model_kwargs["attention_mask"] = None
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if finished is not None and model_kwargs.get("cache") is not None:
            model_kwargs["attention_mask"] = finished.masked(model_kwargs.get("attention_mask"))
        return model_kwargs

    def init_continuous_batching(self, *args, **kwargs):
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "Continuous batching pages keys and values; a memory has none. Use generate() with a padded batch."
        )


class TitansGenerationMixin(EndedRowsMixin):
    """`generate()` for Titans. The memory is updated with every token that is generated.

    Two further private methods are overridden: where a cache is made (`_prepare_cache_for_generation`), and where
    drafts end (`_assisted_decoding`).
    """

    _starting_cache: TitansCache | None = None

    def start_from(self, cache: TitansCache | None) -> None:
        """Sets the memory from which every row of a `generate()` call without `cache` starts; None for the
        learned initial memory. No call changes it, so threads can share it. A prompt then contains the new tokens only.

        Args:
            cache: a cache of this model with one row.

        Raises ValueError for any other cache, RuntimeError for a cache that records.
        """
        if cache is not None:
            check_cache_class("cache", cache)
            if cache.batch_size not in (-1, 1):
                raise ValueError(f"`cache` must have one row, but has {cache.batch_size}.")
            cache.check_fits(self.config, cache.batch_size)
            cache = copy.copy(cache).detach()
            cache.start_prompt()
        self._starting_cache = cache

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def generate(self, inputs: Tensor | None = None, *args, **kwargs):
        """Generates as in Transformers. Raises ValueError for empty inputs."""
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if (embeds := kwargs.get("inputs_embeds")) is not None:  # Transformers then creates the ids
            check_not_empty("inputs_embeds", embeds, 3)
        elif ids is not None:
            check_not_empty("input_ids", ids, 2)
        return super().generate(inputs, *args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size: int, max_cache_length: int
    ) -> None:
        """Checks the options of `generate()` and creates its cache.

        The size of a cache is always limited; with `cache_implementation="static"` it is constant, and `generate()`
        compiles the decoding step where Transformers does: on accelerators, or as `compile_config` sets.
        """
        given = model_kwargs.get("cache")
        _check_inputs(generation_config, generation_mode, model_kwargs)
        if given is not None:
            if isinstance(given, TitansCache):
                check_prompt(generation_config, model_kwargs, generation_mode)
                # generate() then undoes a token that it read beyond the result, because the caller keeps the cache.
                given._is_user_defined = True
            return
        if self._starting_cache is not None:
            if generation_config.use_cache is False:
                raise ValueError("`use_cache` must be None or True after start_from(), but is False.")
            cache = copy.copy(self._starting_cache)
            cache.batch_repeat_interleave(
                batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
            )
        elif generation_config.use_cache is not False:
            cache = TitansCache(self.config, compileable=generation_config.cache_implementation == "static")
        else:
            return
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs["cache"] = cache

    def _assisted_decoding(self, *args, **kwargs):
        """Decodes with drafts. The cache records only while this runs, so that rejected tokens can be removed."""
        cache = kwargs.get("cache")  # a TitansCache; Transformers refuses a call without one
        new = [] if cache is None else [layer for layer in cache.layers if not layer.record_past]
        try:
            return super()._assisted_decoding(*args, **kwargs)
        finally:
            for layer in new:
                layer.record_past, layer.recorded = False, None

    @staticmethod
    def create_masks_for_generate(
        config, inputs_embeds: Tensor, attention_mask: Tensor | None, is_first_iteration: bool = False, **kwargs
    ) -> Tensor | None:
        """Returns the mask of a compiled call: of its new columns only, so that the shape is constant; None for the
        generated token of a single row, which is never padding.
        """
        batch_size, num_tokens, _ = inputs_embeds.shape
        if attention_mask is None or (batch_size == 1 and num_tokens == 1 and not is_first_iteration):
            return None
        return attention_mask[:, -num_tokens:]


def _check_inputs(generation_config, generation_mode: GenerationMode, model_kwargs: dict) -> None:
    """Raises ValueError for options and inputs for which generate() would give other results than forward(); warns of
    attention maps that are cut and of prompts that end in padding.
    """
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if generation_config.assistant_early_exit is not None:
        raise ValueError(
            "`assistant_early_exit` is not possible: while it drafts, Transformers changes the number of layers in the "
            "model's config, which other calls may be using. Use `prompt_lookup_num_tokens` or `assistant_model`."
        )
    for name in ("seq_idx", "cu_seq_lens_q"):
        if model_kwargs.get(name) is not None:
            raise ValueError(
                f"`{name}` must be None in generate(), which adds tokens to the last document: mark documents by "
                "`position_ids` that restart at 0."
            )
    if generation_config.prefill_chunk_size is not None:
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "`prefill_chunk_size` must be None with `inputs_embeds`: Transformers cuts `input_ids` only."
            )
        if isinstance(positions, Tensor) and _has_several_documents(positions, mask):
            raise ValueError(
                "`prefill_chunk_size` must be None with several documents (`position_ids` that restart at 0): a "
                "document that begins at a piece's first token would not be recognised as new."
            )
    recorded = generation_config.output_attentions and generation_config.return_dict_in_generate
    if recorded and generation_mode == GenerationMode.ASSISTED_GENERATION:
        logger.warning_once(
            "The attention maps of assisted generation lack columns for the newest tokens until the sequence is as "
            "long as a map is wide: Transformers cuts a map to one column for each token since the first."
        )
    is_new = model_kwargs.get("cache") is None and not generation_config.is_assistant
    if is_new and isinstance(mask, Tensor) and mask.dim() == 2 and not (mask[:, -1:] != 0).logical_or(mask == 0).all():
        logger.warning_once(
            "A prompt ends in padding (`attention_mask` is 0 in its last column; without one, its last id is "
            "`pad_token_id`). The next token is chosen by the output there, which is undefined: pad on the left "
            "(`tokenizer.padding_side = 'left'`)."
        )


def _has_several_documents(positions: Tensor, mask: Tensor | None) -> bool:
    """Returns True if positions (B or 1, T) restart at 0 after another token of the row, padding left out."""
    ones = torch.ones_like(positions, dtype=torch.bool)
    real = ones if mask is None else mask[:, mask.shape[1] - positions.shape[1] :] != 0
    return bool(((positions == 0) & real & (real.cumsum(-1) > 1)).any())


def check_prompt(generation_config, model_kwargs: dict, generation_mode: GenerationMode) -> None:
    """Raises ValueError if part of the prompt would be read twice or not at all: Transformers assumes that a prompt
    contains all ids, or embeddings, since the cache was created. With ids, the mask may cover columns that the cache
    has read; with embeddings it may not.
    """
    num_read, mask = model_kwargs["cache"].get_seq_length(), model_kwargs.get("attention_mask")
    num_columns = generation_config._mask_length if mask is None else mask.shape[1]
    embeds = model_kwargs.get("inputs_embeds")
    advice = "call `cache.start_prompt()` and give only the tokens to read next."
    if generation_config.use_cache is False:
        raise ValueError("`use_cache` must be True with `cache`, but is False: each step would read the prompt again.")
    if num_read and generation_mode == GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            "Assisted generation (`assistant_model`, `prompt_lookup_num_tokens`) with a `cache` that has read "
            f"{num_read} columns would read them again: {advice}"
        )
    if num_read and embeds is not None and embeds.shape[1] != num_columns:
        raise ValueError(
            f"`inputs_embeds` must have all {num_columns} columns of `attention_mask`, the {num_read} that "
            f"`cache` has read too; or {advice}"
        )
    if 0 < num_columns <= num_read and not generation_config.is_assistant:
        raise ValueError(
            f"The prompt has {num_columns} columns, its mask included, but `cache` has read {num_read} "
            f"already, which come first in a prompt: {advice}"
        )

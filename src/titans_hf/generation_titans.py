"""Adapts `generate()` to Titans: its cache, its masks, and the surprise of the tokens."""

from torch import Tensor
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from .cache_titans import TitansCache
from .surprise_titans import LayerSurprise

CACHES = {
    None: {},
    "dynamic": {},
    "static": {"compileable": True},
    "offloaded": {"offloading": True},
    "offloaded_static": {"offloading": True},  # every Titans cache is of constant size
}
SEQUENTIAL_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class TitansGenerationMixin(GenerationMixin):
    """`generate()` for Titans. The memory is updated with every token that is generated."""

    def generate(self, *args, output_surprise: bool = False, **kwargs):
        """Generates as in Transformers. With `output_surprise` (and `return_dict_in_generate`) the result has
        `surprise`: one `LayerSurprise` per layer, of all tokens read: those of the prompt, and those generated except
        the last.

        Raises ValueError for `output_surprise` with beams, assisted decoding or a compiled step.
        """
        if not output_surprise:
            return super().generate(*args, **kwargs)
        calls = []
        hook = self.register_forward_hook(lambda module, inputs, output: calls.append(output.surprise))
        try:
            result = super().generate(*args, output_surprise=True, **kwargs)
        finally:
            hook.remove()
        result["surprise"] = tuple(map(LayerSurprise.joined, zip(*calls, strict=True)))
        return result

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args) -> None:
        """Creates the cache of `generate()`. Its size is always constant; "static" means that `generate()` compiles the
        decoding step, where Transformers compiles (on accelerators, or as `compile_config` says).
        """
        if model_kwargs.get("output_surprise"):
            _check_surprise(generation_config, generation_mode)
        if generation_config.cache_implementation not in CACHES:
            raise ValueError(
                f"`cache_implementation` must be one of {', '.join(map(repr, CACHES))} for a Titans model, but is "
                f"{generation_config.cache_implementation!r}: its cache is of constant size as it is."
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            cache = TitansCache(self.config, **CACHES[generation_config.cache_implementation])
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs["past_key_values"] = cache

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError(
            "Continuous batching pages keys and values; a Titans memory has none. Use generate() with a padded batch."
        )

    @staticmethod
    def create_masks_for_generate(
        config, inputs_embeds: Tensor, attention_mask: Tensor | None, is_first_iteration: bool = False, **kwargs
    ) -> Tensor | None:
        """Returns the mask of a compiled call: of its new columns only, so that the shape is constant; None for a
        generated token, which is never padding.
        """
        num_tokens = inputs_embeds.shape[1]
        if attention_mask is None or (num_tokens == 1 and not is_first_iteration):
            return None
        return attention_mask[:, -num_tokens:]


def _check_surprise(generation_config, generation_mode: GenerationMode) -> None:
    """Raises ValueError unless every token is read exactly once, in order, in calls that run forward hooks."""
    refused = {
        f"in {generation_mode.value}, which discards tokens that were read": generation_mode not in SEQUENTIAL_MODES,
        "with `cache_implementation='static'`, which compiles": generation_config.cache_implementation == "static",
        "with `use_cache=False`, which reads tokens again": generation_config.use_cache is False,
        "without `return_dict_in_generate=True`, which returns it": not generation_config.return_dict_in_generate,
    }
    for reason, holds in refused.items():
        if holds:
            raise ValueError(f"`output_surprise` is not possible {reason}.")

"""A memory for any causal language model of Transformers: window, sink, passages, fast weights and list.

The package can be called: `titans_hf.remember(model)` is `titans_hf.remember.remember(model)`. The files import each
other in this order: window, titans_layer, fast_weights, passages, token_list, parts, columns, files, cache, reading,
recall, adapter, attach, auto, fit.
"""

import sys
from inspect import signature
from types import ModuleType

from .adapter import RememberConfig, save_adapter
from .attach import forget, remember, remembering
from .auto import RememberForCausalLM
from .cache import MemoryCache
from .fit import fit_memory

__all__ = [
    "MemoryCache",
    "RememberConfig",
    "RememberForCausalLM",
    "fit_memory",
    "forget",
    "remember",
    "remembering",
    "save_adapter",
]


class CallablePackage(ModuleType):
    """The package's own class: `from titans_hf import remember` is both the package and its function."""

    __call__, __signature__ = staticmethod(remember), signature(remember)


sys.modules[__name__].__class__ = CallablePackage

"""A memory for any causal language model of Transformers: a window, a sink, fast weights and a list."""

from .adapter import RememberConfig, RememberForCausalLM, save_adapter
from .fit import fit_memory
from .memory import forget, remember
from .memory_cache import MemoryCache

__all__ = ["MemoryCache", "RememberConfig", "RememberForCausalLM", "fit_memory", "forget", "remember", "save_adapter"]

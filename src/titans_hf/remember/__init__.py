"""A memory for any causal language model of Transformers: a window, a sink, fast weights and a list."""

from .memory import forget, remember
from .memory_cache import MemoryCache

__all__ = ["MemoryCache", "forget", "remember"]

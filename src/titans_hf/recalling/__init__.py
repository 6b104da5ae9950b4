"""`remember`: a causal language model of Transformers attends to a window, and passages of older text are read again.

The files import each other in this order: window, rotary, passages, settings, columns, rows,
recording, texts, files, cache, reading, recall, attach.
"""

from .attach import forget, remember, remembering
from .cache import MemoryCache
from .passages import Passages

__all__ = ["MemoryCache", "Passages", "forget", "remember", "remembering"]

"""Fits the memory of `remember` to texts: fast weights (`fit`), the list (`fit_list`)."""

from .fit import Gains, fit_memory

__all__ = ["Gains", "fit_memory"]

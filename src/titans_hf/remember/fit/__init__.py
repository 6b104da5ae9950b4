"""Fits the memory of `remember` to texts: fast weights (`fit`), the list (`fit_list`)."""

from .fit import fit_memory

__all__ = ["fit_memory"]

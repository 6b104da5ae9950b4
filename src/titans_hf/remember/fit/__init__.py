"""Fits the memory of `remember` to texts: fast weights (`fit`), the list (`fit_list`)."""

from .fit import FitResult, fit_memory, num_readings

__all__ = ["FitResult", "fit_memory", "num_readings"]

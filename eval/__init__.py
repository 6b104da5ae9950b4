"""Benchmarks of the Titans paper, run by lm-eval; `run.py` is the command."""

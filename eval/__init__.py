"""Benchmarks of the Titans paper: those run by lm-eval, whose command is `run.py`, and MAD, `mad.py`."""

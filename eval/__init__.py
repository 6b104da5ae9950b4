"""Benchmarks that train and compare small models, and studies. What lm-eval runs is the command `titans-hf eval`."""

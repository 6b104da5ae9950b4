"""Benchmarks that train and compare small models, and studies. lm-eval's tasks are run by `titans-hf lm-eval`."""

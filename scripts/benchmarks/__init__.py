"""The benchmarks of bench.py, one per module."""

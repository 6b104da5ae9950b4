"""Helpers of several commands: errors, Markdown tables, text files, models to compare."""

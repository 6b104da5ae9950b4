"""Helpers of several commands: errors, Markdown tables, text files."""

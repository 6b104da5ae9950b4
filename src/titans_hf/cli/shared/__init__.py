"""Helpers that several commands use."""

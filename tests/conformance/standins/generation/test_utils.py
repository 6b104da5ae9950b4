"""Stands in for the generation tests, which the source distribution lacks: it brings no test."""


class GenerationTesterMixin:
    pass

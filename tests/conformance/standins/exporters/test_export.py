"""Stands in for the export tests, which the source distribution lacks: it brings no test."""


class ExportTesterMixin:
    pass

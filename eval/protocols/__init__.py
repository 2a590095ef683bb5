"""Evaluation of a model under protocols such as ``full`` and ``1k``. Imports ranking, files and search."""

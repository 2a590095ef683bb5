"""Evaluation of a model under the protocols. Imports ranking, files and search."""

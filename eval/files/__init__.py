"""Readers and writers of the files of an evaluation: embeddings, scores, results and comparisons.

This package may import ``vse.eval.ranking``.
"""

"""Scores, exact ranks, metrics and their confidence intervals, as pure functions of tensors and arrays.

This package imports no other package of ``vse.eval``.
"""

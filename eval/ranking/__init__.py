"""Scores, exact ranks, metrics and their intervals: pure functions of tensors and arrays. Imports the pipeline room alone."""

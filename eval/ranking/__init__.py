"""Scores, exact ranks and metrics, as pure functions of tensors and arrays. Imports no package of ``vse.eval``."""

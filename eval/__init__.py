"""Ranks, R@K, folds, search and tables, computed from embeddings or scores alone. Imports no model."""

if __name__ != "vse.eval":
    raise ImportError(f"import this package as vse.eval, not {__name__}: two copies would not share classes")

DEFAULT_KS = (1, 5, 10)  # the K of R@K in every result; rsum adds up these recalls of both directions

"""Top-K search of embeddings, exact or with a FAISS index, and the check of exact ranks against such a search.

This package may import ``vse.eval.ranking`` and ``vse.eval.files``.
"""

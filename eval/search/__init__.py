"""Top-K search of embeddings, and checks of exact ranks by such a search. It imports ``vse.eval.ranking`` and ``files``."""

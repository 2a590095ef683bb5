"""Top-K search of embeddings, and the check of exact ranks against such a search. Imports ranking and files."""

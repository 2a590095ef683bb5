"""Top-K search of embeddings, exact or by a FAISS index, and the check of exact ranks against it.

May import ranking and files.
"""

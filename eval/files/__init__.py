"""The files of evaluation: embeddings or scores of a split, results and comparisons.

May import ranking.
"""

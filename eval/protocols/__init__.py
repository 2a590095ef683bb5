"""Evaluation of a model under the protocols: folds, full split, captions, CxC, ECCV Caption, phrases; and ensembles.

The entry is :func:`vse.eval.protocols.evaluate.evaluate_files`. May import ranking, files and search.
"""

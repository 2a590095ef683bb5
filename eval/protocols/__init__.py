"""What is evaluated and how: folds, the full split, sentences, CxC and ECCV Caption, ensembles.

May import ranking, files and search.
"""

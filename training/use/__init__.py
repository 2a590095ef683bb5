"""The use of trained runs: embedding and searching a split. May import everything in ``training`` except ``training.py``."""

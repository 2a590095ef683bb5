"""Baselines for image-caption retrieval: a feature cache, small trainers and exact evaluators."""

# The sub-packages are links to the folders at the root of the repository. An editable install puts the folder above this one
# on the path, so that Python, editors and type checkers all see an ordinary package. A wheel holds copies.

__version__ = "0.1.0"

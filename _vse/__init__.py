"""Baselines for image-caption retrieval: a feature cache, small trainers and exact evaluators."""

__version__ = "0.1.0"

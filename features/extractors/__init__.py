"""Extractors: the code that computes each feature. Their settings are in :mod:`vse.features.settings`."""

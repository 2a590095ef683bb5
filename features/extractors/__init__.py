"""The code that computes each feature; the settings of the extractors are in :mod:`vse.features.settings`."""

"""Pairs of images and captions, their inputs for a model, and samplers of batches."""

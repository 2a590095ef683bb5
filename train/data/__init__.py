"""The data of batches: pairs, their images and captions as inputs of a model, and samplers.

Imports no other folder of train.
"""

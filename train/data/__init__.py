"""What a batch is made of: pairs, what a model reads of their images and captions, and samplers.

Imports no other folder of train.
"""

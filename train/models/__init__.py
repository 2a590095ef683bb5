"""Image encoders, caption encoders, similarities, and the model that an experiment builds of them.

Imports no other folder of train.
"""

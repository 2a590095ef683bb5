"""Image and caption encoders, similarities, and the model that combines them. Imports no other folder of ``training``."""

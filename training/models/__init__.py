"""Image and caption encoders, similarities, and the model that combines them."""

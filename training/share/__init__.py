"""Packed models: folders with a trained model that users exchange, for example through the Hugging Face hub."""

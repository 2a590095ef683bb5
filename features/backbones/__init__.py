"""Pretrained networks for images and texts, their weights, and the device that they run on."""

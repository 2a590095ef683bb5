"""Pretrained networks for images and texts, their files of weights, and the choice of device and precision."""

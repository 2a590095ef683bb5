"""Pretrained networks for images and texts, their weights, and the device that they run on."""

if __name__ != "vse.features.backbones":
    raise ImportError(f"import this package as vse.features.backbones, not {__name__}: two copies would not share classes")

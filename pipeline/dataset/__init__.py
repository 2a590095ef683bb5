"""Data sets: images, captions, phrases, splits, their identity, and where they come from."""

SPLITS = ("train", "val", "test", "restval")

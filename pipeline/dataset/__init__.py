"""Data sets: images, captions, phrases and splits, their ids and hashes, and the published files from which they are built."""

SPLITS = ("train", "val", "test", "restval")

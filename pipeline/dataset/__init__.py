"""Data sets: images, captions, phrases, splits, their identity, and where they come from."""

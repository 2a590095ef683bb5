"""Encoders, similarities, losses, batches, the trainer, and the embedding of a split."""

if __name__ != "vse.train":
    raise ImportError(f"import this package as vse.train, not {__name__}: two copies would not share classes")

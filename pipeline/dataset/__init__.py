"""Data sets: images, captions, phrases, splits, their identity, and where they come from."""

if __name__ != "vse.pipeline.dataset":
    raise ImportError(f"import this package as vse.pipeline.dataset, not {__name__}: two copies would not share classes")

"""Data sets, captions, presets, the demo data set, and atomic writes and safe reads of files."""

__version__ = "0.1.0"

if __name__ != "vse.pipeline":
    raise ImportError(f"import this package as vse.pipeline, not {__name__}: two copies would not share classes")

"""The ground floor: configuration, data sets, captions, the demo data set, files that are never half-written."""

__version__ = "0.1.0"

if __name__ != "vse.pipeline":
    raise ImportError(f"import this package as vse.pipeline, not {__name__}: two copies would not share classes")

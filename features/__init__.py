"""The feature cache: its format, its reader, and one file per extractor."""

if __name__ != "vse.features":
    raise ImportError(f"import this package as vse.features, not {__name__}: two copies would not share classes")

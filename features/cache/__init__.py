"""The feature cache: its rows, shards, checksums and reader."""

if __name__ != "vse.features.cache":
    raise ImportError(f"import this package as vse.features.cache, not {__name__}: two copies would not share classes")

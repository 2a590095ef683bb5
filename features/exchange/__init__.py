"""Import features from files of other programs, export them, and publish caches as bundles."""

if __name__ != "vse.features.exchange":
    raise ImportError(f"import this package as vse.features.exchange, not {__name__}: two copies would not share classes")

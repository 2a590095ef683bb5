"""Features from and for other programs: arrays, embeddings, clip-retrieval, VSE++ and SCAN files, bundles."""

if __name__ != "vse.features.exchange":
    raise ImportError(f"import this package as vse.features.exchange, not {__name__}: two copies would not share classes")

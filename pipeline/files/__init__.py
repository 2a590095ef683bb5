"""Files: read untrusted input, write atomically, decide what may be replaced."""

if __name__ != "vse.pipeline.files":
    raise ImportError(f"import this package as vse.pipeline.files, not {__name__}: two copies would not share classes")

"""Import other people's data: tables, WebDataset archives and Hugging Face data sets."""

if __name__ != "vse.pipeline.imports":
    raise ImportError(f"import this package as vse.pipeline.imports, not {__name__}: two copies would not share classes")

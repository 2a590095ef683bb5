"""Presets: their schema, their YAML files, and the parts and own code that they name."""

if __name__ != "vse.pipeline.presets":
    raise ImportError(f"import this package as vse.pipeline.presets, not {__name__}: two copies would not share classes")

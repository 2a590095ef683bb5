"""The feature cache: its format, its reader, and what fills it.

``extractors`` holds the registry, the settings of each extractor and the base classes of their code. The settings import the
modules of this folder that need torch when an extractor runs.
"""

if __name__ != "vse.features":
    raise ImportError(f"import this package as vse.features, not {__name__}: two copies would not share classes")

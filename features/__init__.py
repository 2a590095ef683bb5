"""Extract features of images and captions into caches; read caches, and exchange features with other programs.

``settings`` holds the settings of each extractor and needs neither torch nor h5py. ``extractors`` holds the code of the
extractors and ``backbones`` their networks. ``cache`` writes and reads caches, and ``exchange`` imports and exports
features.
"""

if __name__ != "vse.features":
    raise ImportError(f"import this package as vse.features, not {__name__}: two copies would not share classes")

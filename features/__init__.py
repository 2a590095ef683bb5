"""Extract features of images and captions into caches, read them, and exchange them with other programs.

``settings`` holds the settings of each extractor and needs neither torch nor h5py. ``extractors`` holds the code of the
extractors and ``backbones`` the networks that they run. ``cache`` holds the format of caches and their reader, ``exchange``
the imports and exports. The modules next to these folders extract a feature by its name, verify caches, compare them with a
data set and estimate the work of a workflow.
"""

if __name__ != "vse.features":
    raise ImportError(f"import this package as vse.features, not {__name__}: two copies would not share classes")

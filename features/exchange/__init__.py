"""Import features from files of other programs, export them, and publish caches as bundles."""

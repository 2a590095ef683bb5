"""The use of trained runs: embed a split, search, localise phrases, and compute attention."""

"""The files that evaluation reads and writes: embeddings (or scores) of a split, results and comparisons. May import ranking."""

"""A trained run put to use: embedding a split, searching it. May import everything in train but training."""

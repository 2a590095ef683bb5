"""The use of trained runs: embedding and searching a split. May import everything in train except training."""

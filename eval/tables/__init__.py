"""Tables of results, of comparisons, and of published figures beside ours. May import everything in eval but report."""

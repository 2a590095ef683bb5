"""Reports in HTML: a result, two results side by side, the hits of a search. May import everything in eval but tables."""

"""HTML reports: a result, two results side by side, the results of a search. May import everything in eval but tables."""

"""A page on which people search with trained runs, and what serves it."""

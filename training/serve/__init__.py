"""The web page of vse-serve, on which people search with trained runs, and its server."""

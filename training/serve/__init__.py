"""The web page of vse-serve, where people search with trained runs, and the server of the page."""

"""HTML reports of results and of searches. Imports ranking, files, search and protocols."""

"""HTML reports: of a result, of two results side by side, of what a search returned.

May import ranking, files, search and protocols.
"""

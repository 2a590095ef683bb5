"""Tables of results, of comparisons, and of published metrics beside ours.

May import ranking, files, search and protocols.
"""

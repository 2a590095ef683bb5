"""HTML reports of results and of searches. It imports ``vse.eval.ranking``, ``files``, ``search`` and ``protocols``."""

"""Files: read untrusted input, write atomically, decide what may be replaced."""

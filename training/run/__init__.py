"""The run folder, the inputs of a run, its processes, and interruption. Imports only kinds and models of ``training``."""

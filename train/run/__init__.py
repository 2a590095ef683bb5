"""The run folder, the inputs of a run, several processes, and interruption. Imports only kinds and models of train."""

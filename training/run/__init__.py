"""The run folder, the inputs of a run, the processes that train a run, and the decision to resume a run."""

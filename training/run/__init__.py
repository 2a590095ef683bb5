"""The run folder, packed models, the inputs of a run, and the decision to resume a run."""

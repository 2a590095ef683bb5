"""The run folder and what a run is made from, several processes, interruption. Imports no other folder of train."""

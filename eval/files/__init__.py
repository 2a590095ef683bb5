"""Readers and writers of the files of an evaluation. Imports ``vse.eval.ranking`` only."""

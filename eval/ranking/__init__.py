"""Scores, exact ranks, metrics and their intervals: pure functions of tensors and arrays.

Imports no other folder of the room.
"""

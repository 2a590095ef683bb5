"""Tests of a user's own loss, similarity, encoder or extractor on a small batch, and templates for such code."""

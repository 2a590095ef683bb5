"""Presets: their YAML files, their schema, and the parts (such as losses) that settings name, also in users' own code."""

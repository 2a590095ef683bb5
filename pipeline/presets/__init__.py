"""Presets: their schema, their YAML files, and the parts and users' code that settings name."""

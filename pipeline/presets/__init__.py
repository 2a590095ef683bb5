"""Presets: their schema, their YAML files, and the parts and own code that they name."""

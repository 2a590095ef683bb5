"""Presets: YAML files and schemas, and the classes that settings name, such as losses, of this package or of the user."""

"""The presets that ship: data files only, read by ``vse.pipeline.presets.presets``."""

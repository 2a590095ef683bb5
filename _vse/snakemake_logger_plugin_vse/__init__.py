"""The logger plugin ``vse`` of Snakemake. Snakemake finds plugins by the name of their package."""

from vse.pipeline.step_logger import LogHandler as LogHandler

"""The logger plugin ``vse`` of Snakemake, which finds it by the name of this package. The profiles of the workflow select it."""

from vse.pipeline.step_logger import LogHandler as LogHandler

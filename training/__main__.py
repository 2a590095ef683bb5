"""Run ``vse-train`` as ``python -m vse.training``, for launchers such as ``torchrun --nproc-per-node 2 -m vse.training``."""

from vse.training.cli import train_main

train_main()

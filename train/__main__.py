"""Run ``vse-train`` as ``python -m vse.train``, for launchers of modules: ``torchrun --nproc-per-node 2 -m vse.train``."""

from vse.train.cli import train_main

train_main()

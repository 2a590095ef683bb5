"""``python -m vse.train`` is ``vse-train``, for launchers that start modules: ``torchrun --nproc-per-node 2 -m vse.train``."""

from vse.train.cli import train_main

train_main()

"""Plot of the validation rsum of some runs by epoch or by update, from their metrics.csv: mean and range over seeds.

Fig. 2 of the VSE++ paper has an axis of epochs, Fig. 1 of the paper on adversaries an axis of updates.

    python benchmarks/curves.py --out docs/results/curves.svg vse0=runs/f8k_vse0_effnet vsepp=runs/f8k_vsepp_effnet

Each label names a folder of seeds. A .csv file that an earlier call wrote adds the runs in it. The script also writes the
plotted numbers as a CSV file next to the plot.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd


def read(label: str, folder: Path) -> pd.DataFrame:
    """Return a row for each seed and epoch."""
    tables = [
        pd.read_csv(path).assign(run=label, seed=path.parent.name.removeprefix("seed-"))
        for path in sorted(folder.glob("seed-*/metrics.csv"))
    ]
    if not tables:
        raise SystemExit(f"{folder}: no seed-*/metrics.csv")
    return pd.concat(tables)[["run", "seed", "epoch", "loss", "i2t_r1", "t2i_r1", "rsum"]]


def main() -> None:
    """Read the runs, write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER|CSV")
    parser.add_argument("--out", type=Path, required=True, help=".svg or .png")
    parser.add_argument("--updates", type=int, metavar="N", help="plot by update, with N updates an epoch")
    arguments = parser.parse_args()
    curves = pd.concat([pd.read_csv(run) if run.endswith(".csv") else read(*_split(run)) for run in arguments.runs])
    curves.to_csv(arguments.out.with_suffix(".csv"), index=False, float_format="%.4f", lineterminator="\n")
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for label, rows in curves.groupby("run", sort=False):
        by_epoch = rows.groupby("epoch")["rsum"].agg(["mean", "min", "max"])
        by_epoch.index *= arguments.updates or 1
        n_seeds = rows["seed"].nunique()
        seeds = "1 seed" if n_seeds == 1 else f"{n_seeds} seeds"
        (line,) = axes.plot(by_epoch.index, by_epoch["mean"], label=f"{label} ({seeds})")
        axes.fill_between(by_epoch.index, by_epoch["min"], by_epoch["max"], color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="updates" if arguments.updates else "epoch", ylabel="rsum on the validation split", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    mpl.rcParams["svg.hashsalt"] = "vse"  # the same numbers give the same file
    figure.savefig(arguments.out, metadata={"Date": None} if arguments.out.suffix == ".svg" else None)


def _split(run: str) -> tuple[str, Path]:
    label, equals, folder = run.partition("=")
    if not equals:
        raise SystemExit(f"{run}: LABEL=FOLDER is wanted")
    return label, Path(folder)


if __name__ == "__main__":
    main()

"""Draw curves.svg from summary.csv and last.csv of this folder: rsum against the share of wrong pairs."""

from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

HEADS = {"mh": "max of hinges", "sh": "sum of hinges", "infonce": "InfoNCE", "sigmoid": "sigmoid"}
HEADS |= {"gce": "generalised cross entropy", "cca_minilm": "CCA, MiniLM", "cca_tfidf": "CCA, tf-idf"}
RESULTS = Path("results/noise")

matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "noise", "font.size": 9})
figure = Figure(figsize=(8, 4), layout="constrained")
left, right = figure.subplots(1, 2, sharey=True)
for axes, name, title in ((left, "summary", "best epoch by clean validation"), (right, "last", "last epoch")):
    table = pd.read_csv(RESULTS / f"{name}.csv")
    table = table[table["protocol"] == "full"]
    for number, (head, label) in enumerate(HEADS.items()):
        rows = table[table["experiment"].str.startswith(f"{head}, ")]
        rates = rows["experiment"].str.extract(r", ([\d.]+|clean)")[0].replace("clean", "0").astype(float)
        rows = rows.assign(rate=100 * rates).sort_values("rate")
        if len(rows):
            whisker = [rows["rsum"] - rows["rsum_low"], rows["rsum_high"] - rows["rsum"]]
            axes.errorbar(
                rows["rate"], rows["rsum"], whisker, marker="o", markersize=4, capsize=2, color=f"C{number}", label=label
            )
    axes.set(title=title, xlabel="wrong pairs, %", xticks=[0, 20, 40, 60])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e9ed")
left.set_ylabel("rsum on the test split")
left.legend(frameon=False)
figure.savefig(RESULTS / "curves.svg", metadata={"Date": None, "Creator": None})

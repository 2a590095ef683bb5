"""The documents' tables of results are the committed CSVs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECALLS = {"r1": "R@1", "r5": "R@5", "r10": "R@10"}
LADDER = ("i2t_r1", "t2i_r1", "rsum")


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def rendered(csv: Path, directions: tuple[str, ...] = ("i2t", "t2i"), metrics: dict[str, str] = RECALLS) -> str:
    """The CSV as a Markdown table; of several seeds R@1 and rsum with their standard deviation."""
    columns = {
        f"{direction}_{name}": f"{direction} {title}" if name == "r1" else title
        for direction in directions
        for name, title in metrics.items()
    }
    table = pd.read_csv(csv)
    columns |= {"rsum": "rsum"} if "rsum" in table else {}
    lines = [f"| experiment | seeds | {' | '.join(columns.values())} |", "|---" * (2 + len(columns)) + "|"]
    for _, row in table.iterrows():
        cells = [f"{row[c]:.1f}" if not c.endswith("medr") or row["seeds"] > 1 else f"{row[c]:.0f}" for c in columns]
        for k, column in enumerate(columns):
            if row["seeds"] > 1 and column.endswith(("_r1", "rsum")):
                cells[k] += f" ± {row[f'{column}_std']:.1f}"
        lines.append(f"| `{row['experiment']}` | {row['seeds']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def published(csv: Path) -> str:
    """Rows of a published table with a preset as Markdown: printed recalls, then ours with their intervals."""
    figures = {"i2t_r1": "i2t R@1", "i2t_r10": "R@10", "t2i_r1": "t2i R@1", "t2i_r10": "R@10"}
    table = pd.read_csv(csv)
    titles = [f"printed: {title}" if k == 0 else title for k, title in enumerate(figures.values())]
    titles += [f"ours: {title}" if k == 0 else title for k, title in enumerate(figures.values())]
    lines = [f"| row | system | {' | '.join(titles)} |", "|---" * (2 + len(titles)) + "|"]
    for _, row in table[table["experiment"].notna()].iterrows():
        cells = [f"{row[f'{name}_published']:.1f}" for name in figures]
        cells += [f"{row[f'{name}_ours']:.1f} [{row[f'{name}_low']:.1f}, {row[f'{name}_high']:.1f}]" for name in figures]
        lines.append(f"| {row['row'].partition(' ')[2]} | {row['system']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ladder(csv: Path, best_of_each_head: bool = False) -> str:
    """The CSV of a ladder as Markdown, a star at the best trade-offs."""
    table = pd.read_csv(csv)
    if best_of_each_head:
        table = table.drop_duplicates("method")  # the highest rsum comes first
    titles = ["head", "captions", "images", "seeds", "i2t R@1", "t2i R@1", "rsum", "95% interval", "seconds", "best"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for _, row in table.iterrows():
        metrics = [f"{row[name]:.1f}" for name in LADDER]
        if row["seeds"] > 1:
            metrics = [f"{cell} ± {row[f'{name}_std']:.1f}" for cell, name in zip(metrics, LADDER, strict=True)]
        interval, star = f"{row['rsum_low']:.0f} to {row['rsum_high']:.0f}", "*" if row["best"] == "yes" else ""
        named = [row["method"], f"`{row['captions']}`", f"`{row['images']}`", str(row["seeds"])]
        lines.append(f"| {' | '.join([*named, *metrics, interval, f'{row.total_s:.0f}', star])} |")
    return "\n".join(lines)


def test_the_tables_of_results_are_the_committed_csvs() -> None:
    results = ROOT / "docs" / "results"
    assert ladder(results / "ladder_f8k.csv") in page("ladder")
    assert ladder(results / "ladder_f8k.csv", best_of_each_head=True) in README
    table = rendered(results / "phrases" / "summary.csv", ("phrase",), {**RECALLS, "bound": "bound", "mean_iou": "mean IoU"})
    assert table in page("phrases")
    table = results / "vsepp_4_demo.csv"
    assert published(table) in page("tables")
    assert {"VSE0", "VSE++", "Order0", "Order++"} <= set(pd.read_csv(table).dropna(subset="i2t_r1_ours")["system"])

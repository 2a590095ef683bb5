"""The README's table of results is the committed CSV, and the commands it names are there."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rendered(csv: Path) -> str:
    """The CSV as the README's Markdown table; of several seeds R@1 and rsum with their standard deviation."""
    lines = ["| experiment | seeds | i2t R@1 | R@5 | R@10 | Med r | t2i R@1 | R@5 | R@10 | Med r | rsum |", "|---" * 11 + "|"]
    columns = [f"{way}_{name}" for way in ("i2t", "t2i") for name in ("r1", "r5", "r10", "medr")] + ["rsum"]
    for _, row in pd.read_csv(csv).iterrows():
        figures = [f"{row[c]:.1f}" if not c.endswith("medr") or row["seeds"] > 1 else f"{row[c]:.0f}" for c in columns]
        for k, column in enumerate(columns):
            if row["seeds"] > 1 and column in ("i2t_r1", "t2i_r1", "rsum"):
                figures[k] += f" ± {row[f'{column}_std']:.1f}"
        lines.append(f"| `{row['experiment']}` | {row['seeds']} | {' | '.join(figures)} |")
    return "\n".join(lines)


def test_the_table_of_results_is_the_committed_csv() -> None:
    assert rendered(ROOT / "docs" / "results" / "flickr8k.csv") in README


def test_every_command_and_file_it_names_exists() -> None:
    commands = set(re.findall(r"\bvse-[a-z]+\b", README)) - {"vse-pipeline"}
    assert len(commands) >= 6
    for command in commands:
        assert shutil.which(command, path=str(Path(sys.executable).parent)), command
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link

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
    """The CSV as the README's Markdown table."""
    lines = ["| experiment | i2t R@1 | R@5 | R@10 | Med r | t2i R@1 | R@5 | R@10 | Med r | rsum |", "|---" * 10 + "|"]
    columns = [f"{way}_{name}" for way in ("i2t", "t2i") for name in ("r1", "r5", "r10", "medr")] + ["rsum"]
    for _, row in pd.read_csv(csv).iterrows():
        figures = [f"{row[c]:.0f}" if c.endswith("medr") else f"{row[c]:.1f}" for c in columns]
        lines.append(f"| `{row['experiment']}` | {' | '.join(figures)} |")
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

"""Print the lower bound of each requirement in setup.cfg as a constraint for pip, such as ``numpy==2.0``.

``pip install -c CONSTRAINTS '.[test]'`` then installs the lowest versions of what users need, and the newest tools of tests.
"""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

TOOLS = ("docs", "test")  # extras that no user's command needs


def constraints(setup: Path) -> list[str]:
    """Return a line for each requirement; raises ValueError for one without a lower bound."""
    settings = ConfigParser()
    settings.read(setup, encoding="utf-8")
    extras = settings["options.extras_require"]
    texts = [settings["options"]["install_requires"], *(extras[name] for name in extras if name not in TOOLS)]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    without = [line for line in lines if ">=" not in line]
    if without:
        raise ValueError(f"setup.cfg: no lower bound of {', '.join(without)}")
    return [line.replace(">=", "==") for line in lines]


if __name__ == "__main__":
    print("\n".join(constraints(Path(__file__).parents[1] / "setup.cfg")))

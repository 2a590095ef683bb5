"""Report the progress of a long job by a bar in a terminal or notebook, or by log lines."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from tqdm import tqdm

LOG_INTERVAL_SECONDS = 30.0  # seconds between two log lines; a shorter job logs no line
LOG_FORMAT = "{desc}: {n_fmt} of {total_fmt}, {rate_noinv_fmt}, {elapsed} so far, {remaining} left{postfix}"
log = logging.getLogger(__name__)


class _LoggedBar(tqdm):  # type: ignore[type-arg]
    """A progress bar that logs a line instead of drawing itself."""

    monitor_interval = 0  # no monitor thread

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        log.info("%s", msg or self)


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which can display bars."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    desc: str,
    total: int | None = None,
    unit: str = "it",
    initial: int = 0,
    unit_scale: bool = False,
    hidden: bool = False,
) -> Any:
    """Return a progress bar (tqdm) over ``items``. Without ``items``, the caller calls ``update`` on the bar.

    ``desc`` is the text in front of the bar. ``total`` is the number of units, and ``unit`` is the name of one unit.
    ``initial`` is the number of units that are already done. ``unit_scale`` shortens numbers (12.3k). A ``hidden`` bar prints
    nothing. Outside of a terminal or notebook, the bar logs lines.
    """
    notebook = is_notebook()
    options: dict[str, Any] = {"desc": desc, "total": total, "initial": initial, "unit_scale": unit_scale}
    if sys.stderr.isatty() or notebook or hidden:
        bar: Any = import_module("tqdm.auto").tqdm if notebook else tqdm  # widgets, or text in a notebook without widgets
        return bar(items, unit=unit, disable=hidden, file=sys.stderr, **options)
    options |= dict.fromkeys(("delay", "mininterval", "maxinterval"), LOG_INTERVAL_SECONDS)
    unit = unit if unit_scale else f" {unit}"
    return _LoggedBar(items, unit=unit, file=io.StringIO(), miniters=1, bar_format=LOG_FORMAT, **options)

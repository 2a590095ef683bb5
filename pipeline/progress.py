"""Report the progress of a long job.

A terminal or a notebook displays a bar. Elsewhere, e.g. in the log of a workflow, a line is logged now and then.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 30.0  # seconds between lines; a shorter job logs none
LOG_FORMAT = "{desc}: {n_fmt} of {total_fmt}, {rate_noinv_fmt}, {elapsed} so far, {remaining} left{postfix}"
log = logging.getLogger(__name__)


class _LoggedBar(tqdm):  # type: ignore[type-arg]
    """A progress bar that logs a line whenever it would be drawn."""

    monitor_interval = 0  # no monitor thread

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Log the state of the bar."""
        log.info("%s", msg or self)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which can display bars."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _notebook_bar() -> Any:
    """Return tqdm's bar for notebooks: a widget, or text if the notebook has no widgets."""
    from tqdm.auto import tqdm as notebook_bar

    return notebook_bar


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
    """Return a tqdm bar that iterates over ``items``, or that the caller updates; nothing is displayed if ``hidden``.

    Without a terminal or a notebook, progress, rate and remaining time are logged every ``LOG_SECONDS`` seconds.
    """
    notebook = in_notebook()
    if sys.stderr.isatty() or notebook or hidden:
        bar = _notebook_bar() if notebook else tqdm
        return bar(
            items, desc=desc, total=total, unit=unit, initial=initial, unit_scale=unit_scale, disable=hidden, file=sys.stderr
        )
    return _LoggedBar(
        items,
        desc=desc,
        total=total,
        unit=unit if unit_scale else f" {unit}",
        initial=initial,
        unit_scale=unit_scale,
        file=io.StringIO(),
        delay=LOG_SECONDS,
        mininterval=LOG_SECONDS,
        maxinterval=LOG_SECONDS,
        miniters=1,
        bar_format=LOG_FORMAT,
    )

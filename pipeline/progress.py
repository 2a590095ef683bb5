"""How far a long job is: a bar in a terminal or a notebook; elsewhere, e.g. in the log of a workflow, a line now and then."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 30.0  # seconds between lines; what takes less has none
LOG_FORMAT = "{desc}: {n_fmt} of {total_fmt}, {rate_noinv_fmt}, {elapsed} so far, {remaining} left{postfix}"
log = logging.getLogger(__name__)


class _LoggedBar(tqdm):  # type: ignore[type-arg]
    """A bar that is a line of the log whenever it would be drawn."""

    monitor_interval = 0  # no thread that watches it

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Log the state."""
        log.info("%s", msg or self)


def in_notebook() -> bool:
    """Whether this runs in the kernel of a notebook, whose page shows bars."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _notebook_bar() -> Any:
    """The bar that the page of a notebook draws if it has widgets, else one of text."""
    from tqdm.auto import tqdm as drawn

    return drawn


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
    """A bar as tqdm's, over ``items`` or to be updated by hand; nothing is shown if it is ``hidden``.

    Without a terminal or a notebook, rate and remaining time are logged every ``EVERY`` seconds.
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

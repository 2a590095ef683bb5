"""Write charts of tables as files. Equal charts give equal bytes."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vse.eval.tables.table import FILE_MARKER
from vse.pipeline.files.writing import write_bytes

_CHART_SIZE = (8.0, 5.2)  # inches
_FILE_METADATA = {
    "svg": {"Creator": FILE_MARKER, **dict.fromkeys(("Date", "Format", "Type"))},
    "png": {"Software": FILE_MARKER},
}


def write_chart_file(out: Path, draw: Callable[[Axes], None], name: str) -> Path:
    """Write the chart that ``draw`` draws as ``.svg`` or ``.png``; return ``out``. ``name`` seeds the ids of SVG elements."""
    suffix = out.suffix.removeprefix(".")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's matplotlibrc
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9})
        figure = Figure(figsize=_CHART_SIZE, layout="constrained")
        draw(figure.add_subplot())
        for text in figure.findobj(matplotlib.text.Text):
            text.set_parse_math(False)  # dollar signs in names do not begin a formula
        content = BytesIO()
        figure.savefig(content, format=suffix, dpi=150, metadata=_FILE_METADATA[suffix])
    return write_bytes(out, content.getvalue())

"""Where ids stand: rows by id, by binary search, so that nothing is made for ids that nobody asks for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class IdRows:
    """Rows of ``ids`` (n,), none of which comes twice."""

    def __init__(self, ids: Ids) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]

    def of(self, wanted: Ids) -> NDArray[np.int64]:
        """The row of each id that is wanted, (n_wanted,); -1 for one that is not there."""
        if not len(self._sorted):
            return np.full(len(wanted), -1, np.int64)
        places = np.searchsorted(self._sorted, wanted).clip(max=len(self._sorted) - 1)
        rows: NDArray[np.int64] = np.where(self._sorted[places] == wanted, self._order[places], -1)
        return rows

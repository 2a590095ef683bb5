from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.dataset.columns import IdRows

IDS = st.integers(-(2**63), 2**63 - 1)


@given(ids=st.lists(IDS, unique=True, max_size=20), others=st.lists(IDS, max_size=20))
def test_rows_are_those_of_a_loop(ids: list[int], others: list[int]) -> None:
    wanted = [*others, *ids[::-1]]
    rows = IdRows(np.asarray(ids, np.int64)).find(np.asarray(wanted, np.int64))
    assert rows.tolist() == [ids.index(one) if one in ids else -1 for one in wanted]

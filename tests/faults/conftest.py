"""The runs that suites of faults damage copies of."""

from __future__ import annotations

from tests.train.conftest import caches as caches
from tests.train.conftest import own_run as own_run
from tests.train.conftest import phrase_run as phrase_run
from tests.train.conftest import positions as positions
from tests.train.conftest import run as run

"""The runs that suites of faults damage copies of."""

from __future__ import annotations

from tests.training.conftest import caches as caches
from tests.training.conftest import own_run as own_run
from tests.training.conftest import phrase_run as phrase_run
from tests.training.conftest import positions as positions
from tests.training.conftest import run as run

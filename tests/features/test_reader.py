from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vse.features.cache import open_cache
from vse.features.reader import FeatureReader
from vse.features.shards import shards_folder
from vse.pipeline.errors import UserError


@pytest.mark.parametrize("memory_gb", [0, 1e-5, 1])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(positions=st.lists(st.integers(0, 65), max_size=20))
def test_rows_are_those_of_hdf5_from_memory_or_mapped(cache: Path, memory_gb: float, positions: list[int]) -> None:
    reader = FeatureReader(open_cache(cache), memory_gb)
    with h5py.File(cache) as file:
        expected = file["features"][:][positions]
    np.testing.assert_array_equal(reader.rows(np.asarray(positions, np.int64)), expected)


def test_rows_are_found_by_id_not_by_position(cache: Path) -> None:
    found = open_cache(cache)
    wanted = found.ids[[5, 0, 64]]
    assert FeatureReader(found).positions(wanted).tolist() == [5, 0, 64]


def test_an_id_without_features_is_named(cache: Path) -> None:
    with pytest.raises(UserError, match="1 of 2 images have no features, the first is id 999"):
        FeatureReader(open_cache(cache)).positions([3, 999])


@pytest.mark.parametrize("memory_gb", [0, 1])
def test_a_nan_is_named_with_its_id(own_cache: Path, memory_gb: float) -> None:
    shard = sorted(shards_folder(own_cache).glob("*.h5"))[1]
    with h5py.File(shard, "r+") as file:
        file["features"][2, 0] = np.nan
        bad = int(file["ids"][2])
    reader = FeatureReader(open_cache(own_cache), memory_gb)
    with pytest.raises(UserError, match=f"the features of id {bad} are not finite"):
        reader.refuse_not_finite(np.arange(66))

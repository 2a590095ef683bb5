"""Files of a few kilobytes that decode to gigabytes: refused by one line, and in little memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.hostile import refused
from tests.pipeline.import_files import write_photos
from tests.pipeline.test_import_table import imported
from vse.cli import data_main as main
from vse.features.extractors.words import read_word_vectors
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import open_hdf5, require_hdf5_dataset
from vse.pipeline.files.inputs import check_decoded_zip_size, open_decoded_stream

pytestmark = pytest.mark.nightly

SMALL = "0.01"  # GB
N_BYTES = 15_000_000
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


@pytest.fixture(autouse=True)
def _low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSE_MAX_DECODED_GB", SMALL)


def parquet_bomb(path: Path, n_rows: int, n_bytes: int, **how: object) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    indices = pyarrow.array(np.zeros(n_rows, np.int32))
    captions = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a" * n_bytes]))
    files = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a.jpg"]))
    table = pyarrow.table({"file": files, "caption": captions})
    parquet.write_table(table, path, compression="zstd", store_schema=False, write_statistics=False, **how)
    return path


def test_a_parquet_file_of_kilobytes_does_not_take_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VSE_MAX_DECODED_GB")
    photos = write_photos(tmp_path / "photos", ["a.jpg"])
    table = parquet_bomb(tmp_path / "captions.parquet", 1100, 4_000_000)
    assert table.stat().st_size < 5000
    arguments = ["import", photos, "--captions", table, "--out", tmp_path / "out"]
    code = """
import atexit, pathlib, sys
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text()))
from vse.cli import data_main as main
main(sys.argv[1:])
"""
    process = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert process.returncode == 2, process.stderr
    assert "VSE_MAX_DECODED_GB" in process.stderr.splitlines()[-1]
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", process.stdout)
    assert int(peak) < 1_000_000  # kB
    assert not (tmp_path / "out" / "dataset.json").exists()


@pytest.mark.parametrize(
    "how",
    [{}, {"use_dictionary": False}, {"use_dictionary": False, "column_encoding": {"caption": "DELTA_BYTE_ARRAY"}}],
    ids=["dictionary", "plain", "delta"],
)
def test_a_parquet_table_is_read_up_to_the_limit(tmp_path: Path, how: dict[str, object]) -> None:
    photos = write_photos(tmp_path / "photos", ["a.jpg"])
    table = parquet_bomb(tmp_path / "captions.parquet", 100, N_BYTES // 100, **how)
    assert "VSE_MAX_DECODED_GB" in refused(main, "import", photos, "--captions", table, "--out", tmp_path / "out")


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_texts_in_each_encoding_are_read(tmp_path: Path, encoding: str) -> None:
    photos = write_photos(tmp_path / "photos", ["a.jpg"])
    encodings = {"file": encoding, "caption": encoding}
    table = parquet_bomb(tmp_path / "captions.parquet", 100, 20, use_dictionary=False, column_encoding=encodings)
    dataset = imported(photos, "--captions", table, "--out", tmp_path / "out")
    assert [len(image.captions) for image in dataset.images] == [100]


def test_the_limit_is_raised_by_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "words.txt.gz"
    path.write_bytes(gzip.compress(b"a 1 2\n" + bytes(N_BYTES)))
    with pytest.raises(UserError, match="VSE_MAX_DECODED_GB"), open_decoded_stream(path) as stream:
        stream.read()
    monkeypatch.setenv("VSE_MAX_DECODED_GB", "1")
    with open_decoded_stream(path) as stream:
        assert len(stream.read()) == N_BYTES + 6
    monkeypatch.setenv("VSE_MAX_DECODED_GB", "much")
    with pytest.raises(UserError, match="not a positive number"), open_decoded_stream(path) as stream:
        stream.read()


@pytest.mark.parametrize("kind", COMPRESS)
def test_word_vectors_are_decoded_up_to_the_limit(tmp_path: Path, kind: str) -> None:
    for name in ("words.txt", "words.bin"):
        (tmp_path / f"{name}.{kind}").write_bytes(COMPRESS[kind](b"1 2\nword" + bytes(N_BYTES)))
        with pytest.raises(UserError, match="VSE_MAX_DECODED_GB"):
            read_word_vectors(tmp_path / f"{name}.{kind}")


def test_an_archive_and_a_zip_of_arrays_are_decoded_up_to_the_limit(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.jpg")
        info.pax_headers = {"comment": "x" * N_BYTES}
        tar.addfile(info)
    path = tmp_path / "pairs.tar.gz"
    path.write_bytes(gzip.compress(stream.getvalue()))
    assert "VSE_MAX_DECODED_GB" in refused(main, "import", path, "--out", tmp_path / "out")
    path = tmp_path / "features.npz"
    np.savez_compressed(path, features=np.zeros((N_BYTES // 400, 100), np.float32), ids=np.arange(3))
    with pytest.raises(UserError, match="VSE_MAX_DECODED_GB"):
        check_decoded_zip_size(path)
    assert zipfile.is_zipfile(path)


def test_a_compressed_array_of_hdf5_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "large.h5", "w") as file:
        file.create_dataset("ids", (N_BYTES // 8,), "i8", chunks=(100_000,), compression="gzip")[:] = 0
    with h5py.File(tmp_path / "chunk.h5", "w") as file:  # a chunk that inflates to more than it should
        data = file.create_dataset("ids", (1000,), "i8", chunks=(1000,), compression="gzip")
        data.id.write_direct_chunk((0,), zlib.compress(bytes(N_BYTES)))
    with h5py.File(tmp_path / "filters.h5", "w") as file:
        file.create_dataset("ids", (1000,), "i8", chunks=(1000,), scaleoffset=0)[:] = 1
    for name, message in (("large", "VSE_MAX_DECODED_GB"), ("chunk", "inflates to more"), ("filters", "other filters")):
        with pytest.raises(UserError, match=message), open_hdf5(tmp_path / f"{name}.h5", "ids") as file:
            require_hdf5_dataset(file, "ids")


def test_a_compressed_arrow_file_of_a_saved_data_set_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    batch = pyarrow.record_batch({"caption": ["a" * N_BYTES]})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with (
        pyarrow.OSFile(str(tmp_path / "data.bin"), "wb") as file,
        pyarrow.ipc.new_stream(file, batch.schema, options=options) as stream,
    ):
        stream.write_batch(batch)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.bin"}]}')
    (tmp_path / "dataset_info.json").write_text("{}")
    assert "VSE_MAX_DECODED_GB" in refused(main, "import", tmp_path, "--out", tmp_path / "out")

"""Whatever is given to an import, or lies where weights and word vectors should: one line and exit 2, or a cache."""

from __future__ import annotations

import base64
import gzip
import shutil
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.faults.damages import Payload
from tests.features.conftest import sets
from tests.hostile import NOT_FILES, NOT_JSON, WRONG_VALUES, changed_bytes, refused, refused_or_done, spoilt_json
from vse.cli import data_main as main
from vse.features.cli import extract_main
from vse.features.extractors.captions import encoder_path
from vse.features.extractors.words import read_word_vectors
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

SUITE = "hostile imports"

HUGE = "9" * 5000
HGLMM = ["trained_dim=8", "trained_epochs=1", "min_count=1", "centres=4", "pca=16"]
quick = settings(max_examples=25, phases=[Phase.explicit, Phase.generate])


def npy(array: Any, **how: Any) -> bytes:
    stream = BytesIO()
    np.save(stream, array, **how)
    return stream.getvalue()


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


ARRAYS: dict[str, bytes] = {
    "nothing": b"", "text": b"not numpy", "a pickle": npy(np.asarray([{"a": 1}], object), allow_pickle=True),
    "texts": npy(np.asarray(["a"] * 12)), "one number": npy(np.float32(3)), "no rows": npy(np.zeros((0, 4), np.float32)),
    "four axes": npy(np.zeros((12, 2, 2, 2), np.float32)), "complex numbers": npy(np.zeros((12, 4), complex)),
    "not a number": npy(np.full((12, 4), np.nan, np.float32)), "infinity": npy(np.full((12, 4), np.inf, np.float32)),
    "half": npy(np.zeros((12, 400), np.float32))[:2000],
    "10^12 rows": header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 4), }\n"),
    "negative rows": header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }\n"),
    "a header that is code": header("__import__('os').system('id')\n"), "a deep header": header("(" * 5000 + ")" * 5000),
    "a header of 5,000 digits": header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({HUGE}, 4), }}\n"),
    "a format that is none": header("{'descr': 'x', 'fortran_order': False, 'shape': (12, 4), }\n"),
    "another version": b"\x93NUMPY\x09\x00" + bytes(100),
}  # fmt: skip
IDS = {
    "nothing": b"", "texts": b"a\nb", "fractions": b"0.5\n1.5", "5,000 digits": HUGE.encode(),
    "beyond int64": b"\n".join([b"9223372036854775808"] * 12), "far below": b"\n".join([b"-99999999999999999999"] * 12),
    "bytes": b"\xff\xfe\xff", "zeros": bytes(50), "duplicates": b"0\n" * 12, "too few": b"0\n1",
    "others": b"\n".join(str(k + 1000).encode() for k in range(12)),
}  # fmt: skip


@pytest.fixture
def good(few: Path, tmp_path: Path) -> list[object]:
    ids = [image.imgid for image in load_dataset_file(few).images]
    (tmp_path / "f.npy").write_bytes(npy(np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)))
    (tmp_path / "ids.txt").write_text("\n".join(map(str, ids)))
    out = ["--dataset", few, "--out-features", tmp_path / "out.h5"]
    return ["import-npy", tmp_path / "f.npy", "--ids", tmp_path / "ids.txt", *out]


INPUTS = {"f.npy": [*ARRAYS, *NOT_FILES], "ids.txt": [*IDS, *NOT_FILES], "ids.npy": [*ARRAYS]}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in INPUTS.items() for kind in kinds])
def test_arrays_and_ids_that_are_none_are_refused(name: str, kind: str, good: list[object], tmp_path: Path) -> None:
    file = tmp_path / name
    NOT_FILES[kind](file) if kind in NOT_FILES else file.write_bytes((IDS if name == "ids.txt" else ARRAYS)[kind])
    error = refused(main, *[file if name == "ids.npy" and part == tmp_path / "ids.txt" else part for part in good])
    assert kind not in NOT_FILES or str(file) in error


@quick
@given(data=st.data(), name=st.sampled_from(["f.npy", "ids.txt"]))
def test_any_bytes_of_an_array_are_refused_or_read(data: st.DataObject, name: str, good: list[object], tmp_path: Path) -> None:
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data.draw(changed_bytes(whole)))
    refused_or_done(main, *good)
    (tmp_path / name).write_bytes(whole)


def encoded(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def tsv(**changes: Any) -> bytes:
    boxes = np.asarray([[0, 0, 9, 9], [1, 1, 5, 5]], np.float32)
    fields = {"image_id": "0", "image_w": "100", "image_h": "80", "num_boxes": "2", "boxes": encoded(boxes)}
    fields["features"] = encoded(np.ones((2, 4), np.float32))
    return "\t".join(map(str, {**fields, **changes}.values())).encode() + b"\n"


TSV: dict[str, bytes] = {
    "nothing": b"", "too few fields": b"0\t1\t2\n", "no boxes": tsv(num_boxes=0, boxes="", features=""),
    "negative boxes": tsv(num_boxes=-1), "5,000 digits of boxes": tsv(num_boxes=HUGE), "10^12 boxes": tsv(num_boxes=10**12),
    "fractions of boxes": tsv(num_boxes=0.5), "a size of 5,000 digits": tsv(image_w=HUGE),
    "a size beyond int32": tsv(image_w=2**31), "a size far beyond": tsv(image_h=2**70), "a negative size": tsv(image_w=-5),
    "no size": tsv(image_w=0, image_h=0), "boxes that are no base64": tsv(boxes="!!!"),
    "boxes that are not ASCII": tsv(boxes="ä"), "boxes of other bytes": tsv(boxes="AAAA"),
    "features of other bytes": tsv(features="AAAA"),
    "boxes that are no numbers": tsv(boxes=encoded(np.full((2, 4), np.nan, np.float32))),
    "features that are no numbers": tsv(features=encoded(np.full((2, 4), np.nan, np.float32))),
    "boxes outside": tsv(boxes=encoded(np.full((2, 4), 1e9, np.float32))), "a zero byte": tsv(image_id="0\0"),
    "bytes": b"\xff\xfe\t" * 5 + b"\n", "one line without end": b"x" * 100_000,
}  # fmt: skip


def import_of_tsv(few: Path, folder: Path) -> list[object]:
    return ["import-tsv", folder / "f.tsv", "--dataset", few, "--match", "imgid", "--out-features", folder / "o.h5"]


@pytest.mark.parametrize("kind", [*TSV, *NOT_FILES])
def test_a_tsv_file_that_is_none_is_refused(kind: str, few: Path, tmp_path: Path) -> None:
    file, arguments = tmp_path / "f.tsv", import_of_tsv(few, tmp_path)
    if kind in NOT_FILES:
        refused(main, *arguments[:1], NOT_FILES[kind](file), *arguments[2:])
        return
    ids = [image.imgid for image in load_dataset_file(few).images]
    lines = [TSV[kind], *(tsv(image_id=identity) for identity in ids[1:])]
    file.write_bytes(b"".join(lines))
    refused(main, *arguments)
    file.write_bytes(b"".join([tsv(image_id=ids[0]), *lines[1:]]))
    assert refused_or_done(main, *arguments) is None, "without it the file is sound"


@quick
@given(data=st.data())
def test_any_bytes_of_a_tsv_file_are_refused_or_read(data: st.DataObject, few: Path, tmp_path: Path) -> None:
    whole = b"".join(tsv(image_id=image.imgid) for image in load_dataset_file(few).images)
    (tmp_path / "f.tsv").write_bytes(data.draw(changed_bytes(whole)))
    refused_or_done(main, *import_of_tsv(few, tmp_path))


def precomp(folder: Path) -> list[object]:
    for name, n in (("train", 4), ("dev", 3), ("test", 2)):
        (folder / f"{name}_caps.txt").write_text("".join(f"a dog {k}\n" for k in range(2 * n)))
        rows = np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32)
        (folder / f"{name}_ims.npy").write_bytes(npy(rows))
        (folder / f"{name}_ids.txt").write_text("".join(f"{100 * n + k}\n" for k in range(n)))
    out = ["--out-features", folder / "o.h5", "--out-data", folder / "d" / "dataset.json", "--captions-per-image", 2]
    return ["import-precomp", folder, "--dataset", "mine", *out]


@pytest.mark.parametrize("name", ["train_caps.txt", "dev_ims.npy", "test_ids.txt"])
@pytest.mark.parametrize("kind", ["nothing", "bytes", "zeros", *NOT_FILES])
def test_a_layout_that_is_none_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    arguments, contents = precomp(tmp_path), {"nothing": b"", "bytes": b"\xff\xfe\xff", "zeros": bytes(40)}
    NOT_FILES[kind](tmp_path / name) if kind in NOT_FILES else (tmp_path / name).write_bytes(contents[kind])
    error = refused_or_done(main, *arguments)
    assert error is not None or (name == "train_caps.txt" and kind == "zeros")


@quick
@given(data=st.data(), name=st.sampled_from(["train_caps.txt", "dev_ims.npy", "test_ids.txt"]))
def test_any_bytes_of_a_layout_are_refused_or_read(data: st.DataObject, name: str, tmp_path: Path) -> None:
    arguments = precomp(tmp_path)
    (tmp_path / name).write_bytes(data.draw(changed_bytes((tmp_path / name).read_bytes())))
    refused_or_done(main, *arguments)


@pytest.mark.parametrize("name", ["../../x", "a/b", ".hidden", "a\nb", "x" * 300, "\x1b[2J"])
def test_a_data_set_is_not_called_by_a_path(name: str, tmp_path: Path) -> None:
    arguments = precomp(tmp_path)
    refused(main, *[name if part == "mine" else part for part in arguments])


LAYOUT = ("name", "repeats", "bom", "newline", "ends", "ids", "ids_text")


@pytest.mark.parametrize("key", LAYOUT)
@pytest.mark.parametrize("kind", WRONG_VALUES)
def test_a_layout_with_a_wrong_value_is_refused_or_written(key: str, kind: str, tmp_path: Path) -> None:
    assert refused_or_done(main, *precomp(tmp_path)) is None
    spoilt_json(tmp_path / "d" / "dataset.json", ("precomp", "test", key), WRONG_VALUES[kind])
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    refused_or_done(main, "export-precomp", tmp_path / "o.h5", "--out", tmp_path / "out")
    after = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert all(path.parent == tmp_path / "out" for path in after - before)


WORDS: dict[str, bytes] = {
    "nothing": b"", "text": b"the quick brown fox\njumps", "rows of two lengths": b"a 1 2\nb 1\n",
    "too few rows": b"4 3\na 1 2 3\n", "bytes": b"\xff\xfe\x00", "10^12 words": b"1000000000000 50\na 1 2",
    "10^12 numbers": b"1 1000000000000\na 1 2", "5,000 digits": f"{HUGE} 3\na 1 2 3".encode(),
    "not a number": b"a nan nan\nb nan nan", "infinity": b"a 1e400 1\nb 1 2", "zeros": bytes(1000), "a word alone": b"word\n",
    "negative counts": b"-1 -1\na 1 2",
}  # fmt: skip


@pytest.mark.parametrize("kind", [*WORDS, *NOT_FILES])
@pytest.mark.parametrize("suffix", [".txt", ".bin", ".txt.gz"])
def test_word_vectors_that_are_none_are_refused(kind: str, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"words{suffix}"
    NOT_FILES[kind](file) if kind in NOT_FILES else file.write_bytes(WORDS[kind])
    with pytest.raises(UserError, match="words"):
        read_word_vectors(file)


SOUND_WORDS: dict[str, bytes] = {
    ".txt": b"2 3\na 0.1 0.2 0.3\ndog 1e-2 -4 5\n",
    ".bin": b"2 3\n" + b"".join(word + b" " + np.ones(3, np.float32).tobytes() + b"\n" for word in (b"a", b"dog")),
    ".txt.gz": gzip.compress(b"a 0.1 0.2 0.3\ndog 1e-2 -4 5\n"),
}


@pytest.mark.parametrize("suffix", SOUND_WORDS)
@quick
@given(data=st.data())
def test_any_bytes_of_word_vectors_are_refused_or_read(data: st.DataObject, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"words{suffix}"
    file.write_bytes(SOUND_WORDS[suffix])
    assert set(read_word_vectors(file).words) == {"a", "dog"}
    file.write_bytes(data.draw(changed_bytes(SOUND_WORDS[suffix])))
    with suppress(UserError):
        read_word_vectors(file)


def saved(content: Any) -> bytes:
    stream = BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


WEIGHTS: dict[str, bytes] = {
    "nothing": b"", "text": b"not weights", "a list": saved([1, 2]), "a number": saved(3), "no tensors": saved({"a": 3}),
    "other tensors": saved({"a": torch.zeros(3)}), "keys that are numbers": saved({1: torch.zeros(3)}),
    "code": saved({"a": Payload()}), "half": saved({"a": torch.zeros(3000)})[:2000],
    "a header of safetensors": (10**12).to_bytes(8, "little") + b"{}",
    "JSON of safetensors": (3).to_bytes(8, "little") + b"[1]",
}  # fmt: skip


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_that_are_none_are_refused(kind: str, suffix: str, few: Path, tmp_path: Path) -> None:
    file = tmp_path / f"weights{suffix}"
    file.write_bytes(WEIGHTS[kind])
    arguments = ["cnn", "--dataset", few, "--feature", "fc7", "--set", f"weights={file}", "--out", tmp_path / "f.h5"]
    options = sets("model=squeezenet1_1", "layer=features.2")
    assert str(file) in refused(extract_main, *arguments, *options, "--device", "cpu")


@pytest.fixture(scope="session")
def network() -> dict[str, torch.Tensor]:
    return torchvision.models.squeezenet1_1().state_dict()


SMALL = ["model=squeezenet1_1", "layer=features.2", "grid=2", "resize=32", "crop=32"]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_any_bytes_of_weights_are_refused_or_read(
    data: st.DataObject, suffix: str, network: dict[str, torch.Tensor], few: Path, tmp_path: Path
) -> None:
    whole = saved(network) if suffix == ".pth" else safetensors.torch.save(network)
    file, out = tmp_path / f"weights{suffix}", tmp_path / "f.h5"
    for old in tmp_path.glob("f.*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    file.write_bytes(data.draw(changed_bytes(whole)))
    options = ["--device", "cpu", *sets(*SMALL, f"weights={file}")]
    refused_or_done(extract_main, "cnn", "--dataset", few, "--feature", "fc7", "--out", out, *options)


@pytest.mark.parametrize("feature", ["tfidf", "hglmm"])
@quick
@given(data=st.data())
def test_any_bytes_of_an_encoder_are_refused_or_read(
    data: st.DataObject, feature: str, fitted: dict[str, list[object]], tmp_path: Path
) -> None:
    *arguments, encoder = fitted[feature]
    folder = tmp_path / "own"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(str(encoder)).parent, folder)
    own = folder / Path(str(encoder)).name
    own.write_bytes(data.draw(changed_bytes(own.read_bytes())))
    refused_or_done(extract_main, *arguments, "--out", folder / "f.h5", "--shards", 2, "--shard", 0)


@pytest.fixture(scope="session")
def fitted(few: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for feature, values in (("tfidf", ["min_count=1"]), ("hglmm", HGLMM)):
        out = tmp_path_factory.mktemp(feature) / "f.h5"
        arguments = ["--dataset", few, "--feature", feature, *sets(*values)]
        assert refused_or_done(extract_main, "fit", *arguments, "--out", out) is None
        found[feature] = [feature, *arguments, encoder_path(out)]
    return found


@pytest.mark.parametrize("kind", NOT_JSON)
def test_annotations_that_are_no_json_are_refused(kind: str, tmp_path: Path) -> None:
    content = NOT_JSON[kind]
    (tmp_path / "dataset_flickr8k.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for images in ("images", "Flickr8k_Dataset", "Flicker8k_Dataset"):
        (tmp_path / images).mkdir()
    refused(main, "prepare", "f8k", "--source", tmp_path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""Noise files: wrong pairs and wrong words, drawn at random or imported from other programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import succeeds
from vse.cli import data_main
from vse.pipeline.dataset.dataset import Dataset, Image, load_dataset_file
from vse.pipeline.dataset.splits_and_noise import NoiseKind, apply_noise, import_noise_index, read_noise, write_noise
from vse.pipeline.errors import UserError

N_IMAGES, N_CAPTIONS = 48, 240  # of the demo's training split


def images_of(dataset: Dataset) -> dict[int, int]:
    """The image of each caption."""
    return {caption.sentid: image.imgid for image in dataset.images for caption in image.captions}


def texts_of(dataset: Dataset) -> dict[int, tuple[str, ...]]:
    return {caption.sentid: caption.tokens for image in dataset.images for caption in image.captions}


def with_noise(demo: Path, file: Path) -> tuple[Dataset, Dataset]:
    clean = load_dataset_file(demo)
    return clean, apply_noise(clean, read_noise(file, clean)[0])


@given(rate=st.sampled_from([0.1, 0.4, 0.6, 1.0]), seed=st.integers(0, 99), kind=st.sampled_from(["caption", "image"]))
def test_each_chosen_pair_gets_another_image_and_the_rest_stays(
    demo: Path, tmp_path: Path, rate: float, seed: int, kind: NoiseKind
) -> None:
    clean, noisy = with_noise(demo, write_noise(demo, tmp_path / "noise.json", rate, kind, seed))
    before, after = images_of(clean), images_of(noisy)
    n_items, n_captions_each = (N_IMAGES, 5) if kind == "image" else (N_CAPTIONS, 1)
    assert sum(before[k] != after[k] for k in before) == round(rate * n_items) * n_captions_each
    assert Counter(before.values()) == Counter(after.values())  # each image keeps its number of captions
    assert texts_of(clean) == texts_of(noisy)
    for split in ("val", "test"):
        assert tuple(clean.split(split)) == tuple(noisy.split(split))
    if kind == "image":  # the captions of an image stay together
        assert len({(before[k], after[k]) for k in before}) == len(clean.images)


@given(rate=st.sampled_from([0.05, 0.5, 1.0]), seed=st.integers(0, 99))
def test_each_chosen_word_becomes_another_word_of_the_captions(demo: Path, tmp_path: Path, rate: float, seed: int) -> None:
    clean, noisy = with_noise(demo, write_noise(demo, tmp_path / "noise.json", rate, "word", seed))
    before, after = texts_of(clean), texts_of(noisy)
    assert images_of(clean) == images_of(noisy)
    trained = [caption.sentid for image in clean.split("train") for caption in image.captions]
    words = [word for sentid in trained for word in before[sentid]]
    pairs = [pair for sentid in trained for pair in zip(before[sentid], after[sentid], strict=True)]
    assert sum(old != new for old, new in pairs) == round(rate * len(words))
    assert {new for _, new in pairs} <= set(words)
    assert all(before[sentid] == after[sentid] for sentid in before.keys() - set(trained))
    changed = [c for image in noisy.images for c in image.captions if c.tokens != before[c.sentid]]
    assert all(caption.raw == " ".join(caption.tokens) for caption in changed)


def test_a_seed_determines_the_file_and_a_rate_of_0_changes_nothing(demo: Path, tmp_path: Path) -> None:
    first, again, other = (write_noise(demo, tmp_path / f"{k}.json", 0.4, seed=seed) for k, seed in enumerate((0, 0, 1)))
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    clean, noisy = with_noise(demo, write_noise(demo, tmp_path / "none.json", 0))
    assert noisy is clean


def test_wrong_images_are_drawn_from_all_others(demo: Path, tmp_path: Path) -> None:
    """A wrong image is no more likely for one image than for another."""
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(60):
        clean, noisy = with_noise(demo, write_noise(demo, tmp_path / "noise.json", 1, "image", seed))
        after = images_of(noisy)
        counts.update({(old, after[k]) for k, old in images_of(clean).items()})
    moves = [n for (old, new), n in counts.items() if old != new]
    assert len(moves) > 0.65 * N_IMAGES * (N_IMAGES - 1)  # 72% if all are equally likely
    assert max(moves) <= 8


def test_indexes_of_ncr_and_decl_are_imported(demo: Path, tmp_path: Path) -> None:
    """NCR pairs each caption with the position of an image, DECL each image with the position of another one."""
    clean = load_dataset_file(demo)
    ids, rng = [image.imgid for image in clean.split("train")], np.random.default_rng(0)
    ncr = np.arange(N_CAPTIONS) // 5
    chosen = rng.permutation(N_CAPTIONS)[:96]
    ncr[chosen] = rng.permutation(ncr[chosen])  # as NCR draws it: some captions keep their image
    decl = rng.permutation(N_IMAGES)
    for name, index in {"ncr": ncr, "decl": decl}.items():
        np.save(tmp_path / f"{name}.npy", index)
        succeeds(data_main, "noise", demo, "--from-index", tmp_path / f"{name}.npy", "--out", tmp_path / f"{name}.json")
        _, noisy = with_noise(demo, tmp_path / f"{name}.json")
        got = images_of(noisy)
        for k, caption in enumerate(c for image in clean.split("train") for c in image.captions):
            assert got[caption.sentid] == ids[index[k if name == "ncr" else k // 5]]
        content = json.loads((tmp_path / f"{name}.json").read_text())
        own = np.arange(N_CAPTIONS) // 5 if name == "ncr" else np.arange(N_IMAGES)
        assert content["rate"] == pytest.approx((index != own).mean())
        assert content["kind"] == {"ncr": "caption", "decl": "image"}[name]


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        (np.zeros(47, np.int64), "240 training captions"),
        (np.zeros(48), "type float64"),
        (np.full(48, 48), "refers to image 48"),
        (np.full(240, -1), "48 training images"),
        (np.zeros((48, 5), np.int64), "shape (48, 5)"),
    ],
)
def test_an_index_of_other_data_is_refused(demo: Path, tmp_path: Path, index: np.ndarray, fault: str) -> None:
    np.save(tmp_path / "index.npy", index)
    with pytest.raises(UserError) as error:
        import_noise_index(demo, tmp_path / "index.npy", tmp_path / "noise.json")
    assert fault in str(error.value)
    assert not (tmp_path / "noise.json").exists()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"format": "other"}, "format"),
        ({"imgids": []}, "one entry of tokens"),
        ({"sentids": ["a"]}, "sentids: 0"),
        ({"captions_sha256": "0"}, "another version of the data set"),
        ({"sentids": [10**6], "imgids": [0]}, "caption 1000000 is not in train"),
        ({"sentids": [0], "imgids": [10**6]}, "image 1000000 is not in train"),
        ({"sentids": [0, 0], "imgids": [1, 2]}, "twice"),
        ({"splits": ["holiday"]}, "no images in split 'holiday'"),
    ],
)
def test_a_changed_or_foreign_file_is_refused(demo: Path, tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    file = write_noise(demo, tmp_path / "noise.json", 0.1)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError) as error:
        read_noise(file, load_dataset_file(demo))
    assert fault in str(error.value)


def test_options_that_exclude_each_other_are_named(demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    out = ["--out", tmp_path / "noise.json"]
    assert "--rate" in fails(data_main, "noise", demo, *out)
    assert "leave --rate out" in fails(data_main, "noise", demo, "--rate", 0.1, "--from-index", "a.npy", *out)
    assert "0.001 changes 0" not in fails(data_main, "noise", demo, "--rate", 1.5, *out)


def test_a_rate_that_cannot_be_reached_is_refused(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot exchange their images"):
        write_noise(demo, tmp_path / "noise.json", 1 / N_CAPTIONS)


def test_restval_is_part_of_the_training_images(demo: Path, tmp_path: Path) -> None:
    content = json.loads(demo.read_text())
    for image in content["images"][:20]:
        image["split"] = "restval"
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    file = write_noise(tmp_path / "dataset.json", tmp_path / "noise.json", 1)
    assert json.loads(file.read_text())["splits"] == ["train", "restval"]
    clean, noisy = with_noise(tmp_path / "dataset.json", file)
    changed = [a for a, b in zip(clean.images, noisy.images, strict=True) if a.captions != b.captions]
    assert {image.split for image in changed} == {"train", "restval"}
    assert all(isinstance(image, Image) for image in noisy.images)

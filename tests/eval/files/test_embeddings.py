"""The embeddings file: written values are read unchanged in each form, and a complete score matrix is never held."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.eval.protocols.test_evaluate import made
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings, write_scores
from vse.eval.files.results import find_split_name
from vse.eval.files.split import split_identity
from vse.eval.ranking.ranks import ScoreBlocks, blocks_from_scores, ranks_from_blocks
from vse.pipeline.errors import UserError

RNG = np.random.default_rng(0)
I2T, T2I = RNG.normal(size=(2, 30, 150)).astype(np.float32)


def without_vectors(**changes: Any) -> Embeddings:
    return made(**{"images": None, "captions": None, "similarity": "network", **changes})


def blocks(scores: np.ndarray, rows: int = 7) -> ScoreBlocks:
    image_of_caption = torch.from_numpy(made().image_of_caption())
    return replace(blocks_from_scores(scores, image_of_caption), rows_per_block=rows)


def same(first: Embeddings, second: Embeddings) -> None:
    for name, value in vars(replace(first, source=second.source)).items():
        np.testing.assert_equal(np.asarray(getattr(second, name)), np.asarray(value), err_msg=name)


@pytest.mark.parametrize(
    "run",
    [
        made(),
        made(coco_ids=np.arange(30) + 7, provenance='{"a": 1}'),
        without_vectors(scores=I2T),
        without_vectors(scores_i2t=I2T, scores_t2i=T2I, captions=np.ones((150, 4), np.float32)),
        made(experiment=None, seed=None),
        without_vectors(scores=I2T, pooled_images=I2T[:, :3], pooled_captions=T2I.T[:, :3]),
        without_vectors(scores=I2T, bank_scores_images=I2T[:, :9], bank_scores_captions=T2I.T[:, :2]),
    ],
    ids=["vectors", "numbers of COCO", "scores", "scores of each direction", "unnamed", "pooled vectors", "bank"],
)
def test_what_is_written_is_read(run: Embeddings, tmp_path: Path) -> None:
    same(run, read_embeddings(write_embeddings(tmp_path / "e.h5", run)))


def test_scores_written_block_by_block_are_those_written_at_once(tmp_path: Path) -> None:
    head = without_vectors(captions=np.ones((150, 4), np.float32))
    both = read_embeddings(write_scores(tmp_path / "both.h5", head, blocks(I2T), blocks(T2I)))
    same(replace(head, scores_i2t=I2T, scores_t2i=T2I), both)
    one = read_embeddings(write_scores(tmp_path / "one.h5", head, blocks(I2T)))
    same(replace(head, scores=I2T), one)
    assert all(isinstance(scores, np.memmap) for scores in (one.scores, both.scores_i2t, both.scores_t2i))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_writer_that_is_stopped_leaves_the_file_as_it_was(error: type[BaseException], tmp_path: Path) -> None:
    out = write_embeddings(tmp_path / "e.h5", made())
    before = out.read_bytes()

    def stopped(rows: slice, columns: torch.Tensor | None) -> torch.Tensor:
        if rows.start > 10:
            raise error
        return torch.from_numpy(I2T[rows])

    with pytest.raises(error):
        write_scores(out, without_vectors(), replace(blocks(I2T), score=stopped))
    assert [path.name for path in tmp_path.iterdir()] == ["e.h5"]
    assert out.read_bytes() == before


def test_scores_that_are_not_finite_or_do_not_fit_are_not_written(tmp_path: Path) -> None:
    spoilt = T2I.copy()
    spoilt[23, 4] = np.inf
    with pytest.raises(UserError, match="scores_t2i row 23 is not finite"):
        write_scores(tmp_path / "e.h5", without_vectors(), blocks(I2T), blocks(spoilt))
    with pytest.raises(ValueError, match="blocks of 30 images for 12 image ids"):
        write_scores(tmp_path / "e.h5", made(n_images=12), blocks(I2T))
    assert not list(tmp_path.iterdir())


def test_scores_are_written_and_ranked_without_a_whole_matrix(tmp_path: Path) -> None:
    n_images, captions = 1500, np.arange(4000)
    run = Embeddings(np.arange(n_images), captions, captions % n_images, "demo", "test", similarity="network")
    rows = torch.arange(n_images, dtype=torch.float32)

    def score(some: slice, columns: torch.Tensor | None) -> torch.Tensor:
        return rows[some, None] + torch.zeros(len(captions) if columns is None else len(columns))

    computed = ScoreBlocks(n_images, torch.from_numpy(run.image_of_caption()), 50, score)
    tracemalloc.start()
    path = write_scores(tmp_path / "e.h5", run, computed, computed)
    ranks = ranks_from_blocks(*read_embeddings(path).score_blocks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ranks.t2i.tolist() == [n_images - 1 - image for image in run.caption_image_ids]
    assert peak < n_images * len(captions) * 4 / 3


def test_a_selection_has_the_scores_of_its_rows(tmp_path: Path) -> None:
    images, captions = np.array([4, 2, 9]), np.array([21, 14, 47, 12])
    run = without_vectors(scores_i2t=I2T, scores_t2i=T2I, pooled_images=I2T[:, :3], pooled_captions=T2I.T[:, :3])
    some = read_embeddings(write_embeddings(tmp_path / "e.h5", run)).select(images, captions)
    assert some.image_of_caption().tolist() == [0, 1, 2, 1]
    np.testing.assert_equal(some.scores_i2t[:], I2T[np.ix_(images, captions)])
    np.testing.assert_equal(some.scores_t2i[1:], T2I[np.ix_(images[1:], captions)])
    np.testing.assert_equal(some.pooled_vectors[0], I2T[images, :3])
    np.testing.assert_equal(some.pooled_vectors[1], T2I.T[captions, :3])


def test_float16_blocks_become_float32(tmp_path: Path) -> None:
    half = replace(blocks(I2T), score=lambda rows, columns: torch.from_numpy(I2T[rows]).half())
    written = read_embeddings(write_scores(tmp_path / "e.h5", without_vectors(), half))
    np.testing.assert_equal(written.scores[:], I2T.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("name", ["scores_i2t", "scores_t2i"])
@pytest.mark.parametrize(
    "spoil", [lambda scores: scores[:, 1:], lambda scores: scores + np.where(scores == scores[8, 3], np.inf, 0)]
)
def test_each_matrix_of_scores_is_checked(name: str, spoil: Callable[[np.ndarray], np.ndarray], tmp_path: Path) -> None:
    run = without_vectors(**{"scores_i2t": I2T, "scores_t2i": T2I} | {name: spoil(I2T)})
    with pytest.raises(UserError, match=f"{name} (has shape|row 8 is not finite)"):
        read_embeddings(write_embeddings(tmp_path / "e.h5", run))


def scaled(similarity: str, power: int) -> Embeddings:
    run = made(similarity=similarity)
    return replace(run, images=np.ldexp(run.images, power), captions=np.ldexp(run.captions, power))


@pytest.mark.parametrize("similarity", ["cosine", "order"])
def test_vectors_whose_scores_would_vanish_are_refused(similarity: str, tmp_path: Path) -> None:
    """Their products are below the smallest number of float32, so that all scores would be 0 and every rank the last."""
    with pytest.raises(UserError, match=r"(images|captions) row \d+ is so short .* multiply all vectors by one power of two"):
        read_embeddings(write_embeddings(tmp_path / "short.h5", scaled(similarity, -60)))


@pytest.mark.parametrize(("similarity", "power"), [("cosine", -40), ("order", 30)])
def test_a_power_of_two_changes_no_rank(similarity: str, power: int, tmp_path: Path) -> None:
    run, other = made(similarity=similarity), scaled(similarity, power)
    run.images[3] = other.images[3] = 0  # zeros are not too short
    read = read_embeddings(write_embeddings(tmp_path / "scaled.h5", other))
    one, two = (ranks_from_blocks(*each.score_blocks()) for each in (run, read))
    np.testing.assert_array_equal(one.i2t, two.i2t)
    np.testing.assert_array_equal(one.t2i, two.t2i)


# The named test splits are those that are known by these names.


def of_images(image_ids: list[int], dataset: str = "coco", coco_ids: list[int] | None = None) -> Embeddings:
    ids = np.asarray(image_ids)
    coco = None if coco_ids is None else np.asarray(coco_ids)
    return Embeddings(ids, ids, ids, dataset, "test", scores=np.zeros((len(ids), len(ids)), np.float32), coco_ids=coco)


def test_the_identity_is_the_hash_of_the_sorted_ids() -> None:
    expected = hashlib.sha256(b"[2,7,10]").hexdigest()
    for run, ids in ((of_images([10, 2, 7]), "image_ids"), (of_images([0, 1, 2], coco_ids=[2, 10, 7]), "coco_ids")):
        identity = split_identity(run)
        assert (identity.sha256, identity.ids, identity.name) == (expected, ids, None)


def test_karpathy_s_test_images_of_coco_are_known_by_their_numbers() -> None:
    package = pytest.importorskip("eccv_caption")
    answers = json.loads((Path(package.__file__).parent / "data" / "original_image_to_caption.json").read_text())
    numbers = [int(number) for number in answers]
    assert len(numbers) == 5000
    assert split_identity(of_images(list(range(5000)), coco_ids=numbers)).name == "karpathy"
    assert split_identity(of_images(list(range(4999)), coco_ids=numbers[:-1])).name is None
    assert split_identity(of_images(list(range(5000)), "f30k", coco_ids=numbers)).name is None


def test_a_folder_of_presets_names_further_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    first, second = split_identity(of_images([1])).sha256, split_identity(of_images([2])).sha256
    assert find_split_name("birds", first) is None
    (tmp_path / "published").mkdir()
    file = tmp_path / "published" / "splits.yaml"
    file.write_text(f"birds: {{ spring: [{first}, {second}] }}\n")
    assert (find_split_name("birds", first), find_split_name("birds", second)) == ("spring", "spring")
    file.write_text("birds: spring\n")
    with pytest.raises(UserError, match=r"splits.yaml: names splits as DATASET"):
        find_split_name("birds", first)

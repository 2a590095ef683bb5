"""The option ``--correct`` of ``vse-eval``: subtract from the scores of each candidate how near it is to a bank of queries.

A correction is one number for each candidate. The number b_x of an image x does not change the order of the captions for x,
nor the number b_y of a caption y that of the images for y. So two more dimensions of the vectors correct both directions:
(x, 1, -b_x) . (y, -b_y, 1) = x . y - b_x - b_y. QB-Norm corrects only some queries, so it has scores of each direction.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.eval.files.embeddings import parse_provenance, read_embeddings, resolve_path
from vse.eval.files.results import Result
from vse.eval.files.split import Embeddings
from vse.eval.ranking.hubness import compute_biases, find_activated
from vse.eval.ranking.metrics import compute_metrics
from vse.eval.ranking.ranks import ranks_from_blocks, shared_tensor
from vse.pipeline.dataset.dataset import SPLITS
from vse.pipeline.errors import UserError, did_you_mean

_K, _ALPHA, _BETA = (1, 5, 10, 20, 50, 100), (0.25, 0.5, 0.75, 1.0), (5, 10, 20, 30, 50, 100)
# The values of each parameter that are tried on the validation split.
METHODS: dict[str, dict[str, tuple[float, ...]]] = {
    "mean": {},
    "csls": {"k": _K},
    "nnn": {"k": _K, "alpha": _ALPHA},
    "inverted-softmax": {"beta": _BETA},
    "qb-norm": {"beta": _BETA},
}
Parameters = dict[str, float]


@dataclass(frozen=True)
class LinearScores:
    """The inner products of ``images`` (n_images, dim) and ``captions`` (n_captions, dim), computed when rows are read."""

    images: NDArray[np.float32]
    captions: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.images), len(self.captions)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        scores: NDArray[Any] = self.images[rows] @ self.captions.T
        return scores


def parse_correction(text: str) -> tuple[str, Parameters]:
    """Return the method and the given parameters of a text such as ``csls`` or ``csls:k=10``. Raises UserError."""
    method, _, given = text.partition(":")
    if method not in METHODS:
        raise UserError(f"--correct {text}: no method {method!r}{did_you_mean(method, METHODS)}")
    parameters: Parameters = {}
    for part in filter(None, given.split(",")):
        name, _, value = part.partition("=")
        try:
            parameters[name] = float(value)
        except ValueError:
            raise UserError(f"--correct {text}: {part} is not NAME=NUMBER") from None
        if name not in METHODS[method] or parameters[name] <= 0:
            known = ", ".join(METHODS[method]) or "none"
            raise UserError(f"--correct {text}: {part}: the parameters of {method} are positive numbers: {known}")
    return method, parameters


def correct_seeds(
    files: Sequence[Path], seeds: Sequence[Embeddings], text: str, bank: str, out: Path
) -> tuple[list[Embeddings], dict[str, Any]]:
    """Return corrected embeddings of each seed, and the entry ``correction`` of the result.

    Parameters that ``text`` does not give are those with the highest rsum on the validation split, the mean over seeds.

    Parameters
    ----------
    text : the method, with or without parameters, see :func:`parse_correction`
    bank : a split, whose embeddings are next to each file (``train``: ``train.h5``), or a file of embeddings
    out : the result file, to whose folder paths in the entry are relative
    """
    method, given = parse_correction(text)
    banks = [_read_bank(file, run, bank) for file, run in zip(files, seeds, strict=True)]
    missing = [name for name in METHODS[method] if name not in given]
    tried: dict[str, float] = {}
    parameters = dict(given)
    if missing:
        why = "the parameters of the correction are selected on it"
        validation = [_read_sibling(file, run, "val", why) for file, run in zip(files, seeds, strict=True)]
        # A bank of the test split itself is a bank of the validation split there.
        val_banks = validation if bank == seeds[0].split else [one for _, one in banks]
        best = -np.inf
        for choice in _list_choices(method, missing):
            pairs = zip(validation, val_banks, strict=True)
            rsum = float(np.mean([_rsum(correct(run, of, method, {**given, **choice})) for run, of in pairs]))
            tried[", ".join(f"{name}={value:g}" for name, value in choice.items())] = rsum
            if rsum > best:
                best, parameters = rsum, {**given, **choice}
    first_file, first = banks[0]
    is_same_data = first.dataset == seeds[0].dataset
    entry = {
        "method": method,
        "bank": bank if bank in SPLITS else os.path.relpath(first_file, out.parent),
        "bank_sha256": [run.source.sha256 for _, run in banks if run.source is not None],
        "bank_images": len(first.image_ids),
        "bank_captions": len(first.caption_ids),
        "parameters": parameters,
        "transductive": is_same_data and bool(np.isin(first.image_ids, seeds[0].image_ids).any()),
        **({"rsum_val": tried} if tried else {}),
    }
    return [correct(run, of, method, parameters) for run, (_, of) in zip(seeds, banks, strict=True)], entry


def repeat_correction(path: Path, result: Result, files: Sequence[Path], seeds: Sequence[Embeddings]) -> list[Embeddings]:
    """Return the embeddings of a result ``path`` with the correction that the result records.

    Raises UserError if the bank is not where the result names it, or has changed.
    """
    record = result.correction
    if record is None:
        return list(seeds)
    given = ",".join(f"{name}={value:g}" for name, value in record["parameters"].items())
    bank = str(record["bank"])
    bank = bank if bank in SPLITS else str(resolve_path(path, bank))
    corrected, repeated = correct_seeds(files, seeds, f"{record['method']}:{given}", bank, path)
    if repeated["bank_sha256"][: len(files)] != record["bank_sha256"][: len(files)]:
        raise UserError(f"{path}: the bank {bank} has changed since the evaluation; evaluate again")
    return corrected


def _list_choices(method: str, names: Sequence[str]) -> Iterator[Parameters]:
    for values in product(*(METHODS[method][name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _read_bank(file: Path, run: Embeddings, bank: str) -> tuple[Path, Embeddings]:
    if bank == run.split:
        check_bank(file, run, file, run)
        return file, run
    if bank in SPLITS:
        return file.with_name(f"{bank}.h5"), _read_sibling(file, run, bank, "it is the bank")
    of = read_embeddings(Path(bank))
    check_bank(Path(bank), of, file, run)
    return Path(bank), of


def _read_sibling(file: Path, run: Embeddings, split: str, why: str) -> Embeddings:
    path = file.with_name(f"{split}.h5")
    if not path.is_file():
        raise UserError(f"{path}: no such file, but {why}; write it with vse-embed {file.parent} --split {split}")
    of = read_embeddings(path)
    check_bank(path, of, file, run)
    return of


def check_bank(path: Path, bank: Embeddings, file: Path, run: Embeddings) -> None:
    """Raise UserError if ``bank`` does not hold vectors of the same run as the embeddings ``run`` in ``file``."""
    for name, one in ((file, run), (path, bank)):
        if one.vectors is None or one.similarity != "cosine":
            raise UserError(f"{name}: a correction needs vectors that are compared by inner products; leave --correct out")
    assert run.vectors is not None
    assert bank.vectors is not None
    if bank.vectors[0].shape[1] != run.vectors[0].shape[1]:
        raise UserError(f"{path}: has vectors of another length than {file}; they are of another model")
    if (bank.experiment, bank.seed) != (run.experiment, run.seed) and None not in (bank.experiment, run.experiment):
        raise UserError(f"{path}: holds embeddings of another run than {file}")
    trained = [parse_provenance(one).get("trained") for one in (bank, run)]
    if trained[0] != trained[1] and None not in trained:
        raise UserError(f"{path}: the run was trained again between this file and {file}; write both again with vse-embed")


def correct(run: Embeddings, bank: Embeddings, method: str, parameters: Mapping[str, float]) -> Embeddings:
    """Return embeddings whose inner products are the corrected scores, or with ``qb-norm`` the scores of each direction."""
    assert run.vectors is not None
    assert bank.vectors is not None
    images, captions = map(shared_tensor, run.vectors)
    bank_images, bank_captions = map(shared_tensor, bank.vectors)
    of_images = compute_biases(images, bank_captions, method, parameters)
    of_captions = compute_biases(captions, bank_images, method, parameters)
    x, y = run.vectors
    if method != "qb-norm":
        ones = np.ones(len(x), np.float32), np.ones(len(y), np.float32)
        return replace(
            run, images=np.column_stack([x, ones[0], -of_images]), captions=np.column_stack([y, -of_captions, ones[1]])
        )
    image_gate = find_activated(captions, bank_images, images).astype(np.float32)
    caption_gate = find_activated(images, bank_captions, captions).astype(np.float32)
    return replace(
        run,
        images=None,
        captions=None,
        scores_i2t=LinearScores(np.column_stack([x, image_gate]), np.column_stack([y, -of_captions])),
        scores_t2i=LinearScores(np.column_stack([x, -of_images]), np.column_stack([y, caption_gate])),
    )


def _rsum(run: Embeddings) -> float:
    return float(compute_metrics(ranks_from_blocks(*run.score_blocks()))["rsum"])

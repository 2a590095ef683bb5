"""The option ``--correct`` of ``vse-eval``: lower scores of candidates that are near many queries of a bank.

A bank is a set of images and captions that serve as queries, usually those of the training split. A correction subtracts
a number from all scores of a candidate: b_x for an image x, and b_y for a caption y. If x is the query instead, b_x lowers the
scores of all captions by the same amount, and their order stays the same. If y is the query, the same holds for b_y. The score
x . y - b_x - b_y therefore serves both directions. It is the inner product of vectors with two more dimensions:
(x, 1, -b_x) . (y, -b_y, 1). QB-Norm corrects only some queries. Its result has two matrices of scores, one for each direction.

A model such as SCAN has scores of pairs instead of vectors. Its embeddings file must also have the scores of its images and
captions with the captions and images of the bank (``vse-embed --bank-images`` writes them).
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
from vse.eval.files.split import SCORE_NAMES, Embeddings
from vse.eval.ranking.hubness import InnerProducts, compute_biases, mark_corrected_queries
from vse.eval.ranking.metrics import compute_metrics
from vse.eval.ranking.ranks import ScoreMatrix, ranks_from_blocks
from vse.pipeline.dataset.dataset import SPLITS
from vse.pipeline.errors import UserError, did_you_mean

_K_VALUES, _ALPHA_VALUES, _BETA_VALUES = (1, 5, 10, 20, 50, 100), (0.25, 0.5, 0.75, 1.0), (5, 10, 20, 30, 50, 100)
# For each method, the values of its parameters that are tried on the validation split.
PARAMETER_CHOICES: dict[str, dict[str, tuple[float, ...]]] = {
    "mean": {},
    "csls": {"k": _K_VALUES},
    "nnn": {"k": _K_VALUES, "alpha": _ALPHA_VALUES},
    "inverted-softmax": {"beta": _BETA_VALUES},
    "qb-norm": {"beta": _BETA_VALUES},
}
CorrectionParameters = dict[str, float]


@dataclass(frozen=True)
class BankScores:
    """The scores of the images and captions of a split with the captions and images of a bank.

    A bank is a set of images and captions by which a correction finds hubs (candidates near many queries).

    ``image_scores`` : (n_images, n_bank_captions). ``caption_scores`` : (n_captions, n_bank_images).
    ``path`` : the file with the bank, or with these scores.
    ``sha256`` : the SHA-256 of this file; None if it is not known.
    ``is_transductive`` : True if the bank contains an image of the evaluated split.
    """

    image_scores: ScoreMatrix
    caption_scores: ScoreMatrix
    path: Path
    sha256: str | None
    is_transductive: bool


@dataclass(frozen=True)
class CorrectedScores:
    """The matrix ``scores`` + ``rows`` @ ``columns``.T. It is computed only for the images that are read.

    ``rows`` (n_images, k) and ``columns`` (n_captions, k) have k numbers for each image and caption; k is 1 or 2.
    """

    scores: ScoreMatrix
    rows: NDArray[np.float32]
    columns: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.scores.shape

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        corrected: NDArray[Any] = self.scores[rows] + self.rows[rows] @ self.columns.T
        return corrected


def parse_correction(text: str) -> tuple[str, CorrectionParameters]:
    """Return the method and the parameters in a text such as ``csls`` or ``csls:k=10``.

    Raises UserError if the method or a parameter is unknown, or if a value is not a positive number.
    """
    method, _, given = text.partition(":")
    if method not in PARAMETER_CHOICES:
        raise UserError(f"--correct {text}: no method {method!r}{did_you_mean(method, PARAMETER_CHOICES)}")
    parameters: CorrectionParameters = {}
    for part in filter(None, given.split(",")):
        name, _, value = part.partition("=")
        try:
            parameters[name] = float(value)
        except ValueError:
            raise UserError(f"--correct {text}: {part} is not NAME=NUMBER") from None
        if name not in PARAMETER_CHOICES[method] or parameters[name] <= 0:
            known = ", ".join(PARAMETER_CHOICES[method]) or "none"
            raise UserError(f"--correct {text}: {part}: the parameters of {method} are positive numbers: {known}")
    return method, parameters


def correct_seed_scores(
    files: Sequence[Path], seeds: Sequence[Embeddings], text: str, bank: str, out: Path
) -> tuple[list[Embeddings], dict[str, Any]]:
    """Return the embeddings of each seed with corrected scores, and the entry ``correction`` of the result file.

    A parameter that ``text`` lacks gets the value with the highest rsum on the validation split, as a mean over seeds.

    Parameters
    ----------
    files, seeds : the embeddings file of each seed of the model, and its content
    text : the method, with or without parameters, such as ``csls`` or ``csls:k=10``
    bank : the images and captions by which hubs (candidates near many queries) are found: a file of embeddings, or the name of
        a split; ``train`` is the file ``train.h5`` next to the file of each seed
    out : the result file; paths in the entry are relative to its folder
    """
    method, given = parse_correction(text)
    banks = [read_bank_scores(file, run, bank) for file, run in zip(files, seeds, strict=True)]
    missing = [name for name in PARAMETER_CHOICES[method] if name not in given]
    tried: dict[str, float] = {}
    parameters = dict(given)
    if missing:
        why = "the parameters are selected on it"
        validation = [_read_other_split(file, run, "val", why) for file, run in zip(files, seeds, strict=True)]
        # If the evaluated split is its own bank, the validation split is its own bank, too.
        val_bank = "val" if bank == seeds[0].split else bank
        pairs = [(run, read_bank_scores(path, run, val_bank)) for path, run in validation]
        best = -np.inf
        for choice in _list_parameter_choices(method, missing):
            rsum = float(
                np.mean([_compute_rsum(correct_scores(run, one_bank, method, {**given, **choice})) for run, one_bank in pairs])
            )
            tried[", ".join(f"{name}={value:g}" for name, value in choice.items())] = rsum
            if rsum > best:
                best, parameters = rsum, {**given, **choice}
    first = banks[0]
    entry = {
        "method": method,
        "bank": bank if bank in SPLITS else os.path.relpath(first.path, out.parent),
        "bank_sha256": [one.sha256 for one in banks if one.sha256 is not None],
        "bank_images": first.caption_scores.shape[1],
        "bank_captions": first.image_scores.shape[1],
        "parameters": parameters,
        "transductive": first.is_transductive,
        **({"rsum_val": tried} if tried else {}),
    }
    return [correct_scores(run, one_bank, method, parameters) for run, one_bank in zip(seeds, banks, strict=True)], entry


def repeat_correction(path: Path, result: Result, files: Sequence[Path], seeds: Sequence[Embeddings]) -> list[Embeddings]:
    """Repeat the correction of scores that ``result`` records; without a correction, return ``seeds`` unchanged.

    ``path`` is the file of the result. ``files`` and ``seeds`` are the embeddings file of each seed and its content. Raises
    UserError if the bank is not at the recorded path, or has changed.
    """
    record = result.correction
    if record is None:
        return list(seeds)
    given = ",".join(f"{name}={value:g}" for name, value in record["parameters"].items())
    bank = str(record["bank"])
    bank = bank if bank in SPLITS else str(resolve_path(path, bank))
    corrected, repeated = correct_seed_scores(files, seeds, f"{record['method']}:{given}", bank, path)
    if repeated["bank_sha256"][: len(files)] != record["bank_sha256"][: len(files)]:
        raise UserError(f"{path}: the bank {bank} has changed since the evaluation; evaluate again")
    return corrected


def _list_parameter_choices(method: str, names: Sequence[str]) -> Iterator[CorrectionParameters]:
    for values in product(*(PARAMETER_CHOICES[method][name] for name in names)):
        yield dict(zip(names, values, strict=True))


def read_bank_scores(file: Path, run: Embeddings, bank: str) -> BankScores:
    """Return the scores of the images and captions in ``run`` with the captions and images of a bank.

    ``run`` was read from ``file``. ``bank`` is a file of embeddings, or a split such as ``train``, read from ``train.h5``.
    If ``run`` has scores instead of vectors, ``bank`` must be the evaluated split or ``train``. For ``train``, ``run`` must
    also have scores with images and captions of the training split. Raises UserError if this is not so, or if the bank was not
    computed by the same training run.
    """
    path, source = file, run
    has_scores = run.direction_scores("t2i") is not None
    if has_scores and bank != run.split:
        if bank != "train":
            raise UserError(f"{file}: has scores of pairs; their bank is train, or the split itself with --bank {run.split}")
        if run.bank_scores_images is None or run.bank_scores_captions is None:
            command = f"vse-embed {file.parent} --split {run.split} --bank-images 1000"
            raise UserError(f"{file}: has scores of pairs, but none with a bank; write it again with {command}")
        return BankScores(run.bank_scores_images, run.bank_scores_captions, file, _get_sha256(run), is_transductive=False)
    if bank in SPLITS and bank != run.split:
        path, source = _read_other_split(file, run, bank, "it is the bank")
    elif bank != run.split:
        path = Path(bank)
        source = read_embeddings(path)
    check_bank_file(path, source, file, run)
    if run.vectors is not None and source.vectors is not None:
        image_scores: ScoreMatrix = InnerProducts(run.vectors[0], source.vectors[1])
        caption_scores: ScoreMatrix = InnerProducts(run.vectors[1], source.vectors[0])
    else:
        i2t, image_scores = _get_score_matrices(run)
        caption_scores = np.asarray(i2t[:]).T
    is_transductive = source.dataset == run.dataset and bool(np.isin(source.image_ids, run.image_ids).any())
    return BankScores(image_scores, caption_scores, path, _get_sha256(source), is_transductive)


def _get_sha256(run: Embeddings) -> str | None:
    return None if run.source is None else run.source.sha256


def _read_other_split(file: Path, run: Embeddings, split: str, why: str) -> tuple[Path, Embeddings]:
    path = file.with_name(f"{split}.h5")
    if not path.is_file():
        raise UserError(f"{path}: no such file, but {why}; write it with vse-embed {file.parent} --split {split}")
    sibling = read_embeddings(path)
    check_bank_file(path, sibling, file, run)
    return path, sibling


def _get_score_matrices(run: Embeddings) -> tuple[ScoreMatrix, ScoreMatrix]:
    """Return the scores (n_images, n_captions) for image-to-text and for text-to-image retrieval.

    If ``run`` has vectors, both are the same matrix: the inner products of the vectors.
    """
    if run.vectors is not None:
        scores = InnerProducts(*run.vectors)
        return scores, scores
    i2t, t2i = run.direction_scores("i2t"), run.direction_scores("t2i")
    assert i2t is not None
    assert t2i is not None
    return i2t, t2i


def check_bank_file(path: Path, bank: Embeddings, file: Path, run: Embeddings) -> None:
    """Raise UserError if ``bank`` and the evaluated embeddings ``run`` were not computed by the same training run.

    ``bank`` was read from ``path``, and ``run`` from ``file``. UserError is also raised if the vectors of one of the files
    are not compared by inner products.
    """
    for name, one in ((file, run), (path, bank)):
        if one.vectors is not None and one.similarity != "cosine":
            raise UserError(f"{name}: a correction needs inner products of vectors, or scores of pairs; leave --correct out")
    dims = [None if one.vectors is None else one.vectors[0].shape[1] for one in (run, bank)]
    if dims[0] != dims[1]:
        raise UserError(f"{path}: has vectors of another length than {file}; they are of another model")
    if (bank.experiment, bank.seed) != (run.experiment, run.seed) and None not in (bank.experiment, run.experiment):
        raise UserError(f"{path}: holds embeddings of another run than {file}")
    trained = [parse_provenance(one).get("trained") for one in (bank, run)]
    if trained[0] != trained[1] and None not in trained:
        raise UserError(f"{path}: the run was trained again between this file and {file}; write both again with vse-embed")


def correct_scores(run: Embeddings, bank: BankScores, method: str, parameters: Mapping[str, float]) -> Embeddings:
    """Return embeddings whose inner products are the corrected scores of ``run``.

    ``bank`` has the scores of the candidates with other queries, such as those of the training split. ``method`` and
    ``parameters`` are, e.g., ``csls`` and ``{"k": 10}``. If ``run`` has scores of pairs, or if ``method`` is ``qb-norm``, the
    result has the corrected scores of all pairs instead of vectors.
    """
    image_biases, caption_biases = (
        compute_biases(side, method, parameters) for side in (bank.image_scores, bank.caption_scores)
    )
    i2t, t2i = _get_score_matrices(run)
    if method == "qb-norm":
        query_scores = np.asarray(i2t[:]).T if run.vectors is None else InnerProducts(run.vectors[1], run.vectors[0])
        image_gate = mark_corrected_queries(bank.caption_scores, query_scores)
        caption_gate = mark_corrected_queries(bank.image_scores, t2i)
        return replace(
            run,
            images=None,
            captions=None,
            scores=None,
            scores_i2t=CorrectedScores(i2t, image_gate[:, None].astype(np.float32), -caption_biases[:, None]),
            scores_t2i=CorrectedScores(t2i, -image_biases[:, None], caption_gate[:, None].astype(np.float32)),
        )
    images = np.column_stack([np.ones_like(image_biases), -image_biases])
    captions = np.column_stack([-caption_biases, np.ones_like(caption_biases)])
    if run.vectors is not None:
        return replace(
            run, images=np.column_stack([run.vectors[0], images]), captions=np.column_stack([run.vectors[1], captions])
        )
    corrected: dict[str, Any] = {
        name: CorrectedScores(scores, images, captions) for name in SCORE_NAMES if (scores := getattr(run, name)) is not None
    }
    return replace(run, **corrected)


def _compute_rsum(run: Embeddings) -> float:
    return float(compute_metrics(ranks_from_blocks(*run.score_blocks()))["rsum"])

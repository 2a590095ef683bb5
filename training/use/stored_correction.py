"""The correction of hubs in the folder of a run: ``vse-embed --correct`` stores the correction, and searches use it.

Hubs are candidates that rank high for many queries. The correction lowers their scores. The file ``correction.safetensors``
contains the method, its parameters and the bank: the embeddings of the training split. The corrected score of a candidate x
and a query y is x · y - b_x. The method computes the number b_x from the bank. The score is the inner product of (x, -b_x)
and (y, 1), so every index of inner products can find the highest scores. See :mod:`vse.eval.protocols.correction`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vse.eval.files.embeddings import read_embeddings
from vse.eval.protocols.correction import correct_seed_scores, parse_correction
from vse.eval.ranking.answers import Corpus, Vectors, read_blocks
from vse.eval.ranking.hubness import InnerProducts, compute_biases
from vse.eval.ranking.ranks import shared_tensor
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import wrap_read_errors
from vse.pipeline.files.writing import write_bytes
from vse.training.experiment import ExperimentConfig
from vse.training.run.folder import RunFolder
from vse.training.run.packed import open_model_folder

log = logging.getLogger(__name__)
_ROWS_PER_BLOCK = 4096
_NOT_LINEAR = "qb-norm"  # this method corrects only some queries, so no index can search its scores
_ADVICE = "store it again with vse-embed --correct, or delete the file to search without a correction"


@dataclass(frozen=True)
class StoredCorrection:
    """A correction of hubs (candidates that rank high for many queries), with its bank, the embeddings of the training split.

    ``method``, ``parameters`` : method, such as ``csls``, and its parameters, such as ``{"k": 10}``.
    ``image_bank``, ``caption_bank`` : the bank: image and caption embeddings, (n_images, dim) and (n_captions, dim).
    ``sha256`` : SHA-256 of the file of the correction.
    """

    method: str
    parameters: dict[str, float]
    image_bank: Tensor
    caption_bank: Tensor
    sha256: str

    def append_corrections(self, vectors: Corpus, by_photo: bool) -> Vectors:
        """Append the number -b_x to the vector of each candidate x, and return the vectors (n, dim + 1).

        The correction b_x is subtracted from all scores of x. The candidates are captions if ``by_photo``, images
        otherwise.
        """
        bank = (self.image_bank if by_photo else self.caption_bank).numpy()
        blocks = []
        for _, rows in read_blocks(vectors, _ROWS_PER_BLOCK):
            biases = compute_biases(InnerProducts(rows, bank), self.method, self.parameters)
            blocks.append(np.column_stack([rows, -biases]).astype(np.float32))
        return np.concatenate(blocks)


def extend_queries(queries: Vectors, corrected: bool = True) -> Vectors:
    """Append 1 to each query for a search with corrected scores, or 0 for uncorrected scores.

    The search compares these queries with the candidates of :meth:`StoredCorrection.append_corrections`.
    """
    return np.column_stack([queries, np.full(len(queries), float(corrected), np.float32)])


def check_correctable(correction: str, run: Path) -> None:
    """Raise UserError if ``correction``, a method such as ``csls``, cannot be used in searches with a run."""
    if parse_correction(correction)[0] == _NOT_LINEAR:
        raise UserError(f"--correct {correction}: corrects only some queries, so no index can search it; name another method")
    if open_model_folder(run).read_settings(ExperimentConfig).model.similarity.ranking_similarity != "cosine":
        raise UserError(f"{run}: a correction needs vectors that are compared by inner products; leave --correct out")


def store_correction(run: Path, correction: str, train_file: Path, val_file: Path) -> Path:
    """Write a correction of hubs, such as ``csls`` or ``csls:k=10``, to the folder of a run, and return the file's path.

    The file also contains the embeddings in ``train_file`` (training split). A search computes the correction from them.
    Parameters that ``correction`` does not set get the values with the highest rsum on ``val_file`` (validation split).
    """
    method, _ = parse_correction(correction)
    folder = RunFolder(run)
    _, entry = correct_seed_scores([val_file], [read_embeddings(val_file)], correction, "train", val_file)
    bank = read_embeddings(train_file)
    assert bank.vectors is not None
    tensors = {name: shared_tensor(side).half() for name, side in zip(("images", "captions"), bank.vectors, strict=True)}
    about = {"method": method, "parameters": entry["parameters"], "weights_sha256": folder.read_best_weights_with_sha256()[1]}
    content = safetensors.torch.save(tensors, {"correction": json.dumps(about)})
    log.info("%s: searches are corrected by %s, %s", run, method, entry["parameters"])
    return write_bytes(folder.correction_file, content)


def read_correction(folder: RunFolder, weights_sha256: str) -> StoredCorrection | None:
    """Return the stored correction of a run or packed model, or None if there is no such file.

    Raises UserError if the file is damaged, or if it was stored for weights with another SHA-256 than ``weights_sha256``.
    """
    if not folder.correction_file.is_file():
        return None
    content, sha256 = folder.read_file_with_sha256(folder.correction_file)
    with wrap_read_errors(folder.correction_file, f"a correction; {_ADVICE}"):
        tensors = safetensors.torch.load(content)
        header_size = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + header_size])["__metadata__"]["correction"])
        parameters = {str(name): float(value) for name, value in about["parameters"].items()}
        parse_correction(f"{about['method']}:{','.join(f'{name}={value}' for name, value in parameters.items())}")
        images, captions = (tensors[name].float() for name in ("images", "captions"))
        if images.ndim != 2 or captions.ndim != 2 or images.shape[1] != captions.shape[1] or not len(images) * len(captions):
            raise ValueError("its bank is not two matrices of one width")
        if not all(torch.isfinite(side).all() for side in (images, captions)):
            raise ValueError("its bank is not finite")
    if about.get("weights_sha256") != weights_sha256:
        raise UserError(f"{folder.correction_file}: was stored for other weights; {_ADVICE}")
    return StoredCorrection(about["method"], parameters, images, captions, sha256)

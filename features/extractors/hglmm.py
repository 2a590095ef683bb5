"""The encoder ``hglmm``: Fisher vectors of captions, from one or several hybrid Gaussian-Laplacian mixtures."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from sklearn.decomposition import FastICA
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from torch.nn.functional import normalize

from vse.features.backbones.device import pick_device
from vse.features.extractors.mixture import Mixture, compute_fisher_vectors, draw_initial_mixture, fit_mixture, power_normalize
from vse.features.extractors.words import WordVectors, prepare_word_vectors
from vse.features.settings.captions import CaptionCorpus, CaptionEncoder, HglmmConfig, TokenLists
from vse.pipeline.errors import UserError
from vse.pipeline.progress import progress_bar

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProjectedMixture:
    """One mixture of an encoder, with the principal components of its Fisher vectors.

    A caption's vector is the Fisher vector minus ``pca_mean``, projected on the axes ``pca_axes``. Without these two tensors,
    the caption's vector is the Fisher vector itself.
    """

    mixture: Mixture
    pca_mean: Float[Tensor, " two_K_D"] | None = None
    pca_axes: Float[Tensor, "n_components two_K_D"] | None = None

    @property
    def dim(self) -> int:
        return 2 * self.mixture.mean.numel() if self.pca_axes is None else len(self.pca_axes)

    def to(self, like: Tensor) -> ProjectedMixture:
        projection = (None if tensor is None else tensor.to(like) for tensor in (self.pca_mean, self.pca_axes))
        return ProjectedMixture(self.mixture.to(like), *projection)

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters of the mixture and of the principal components, by name."""
        tensors = {f"mixture.{f.name}": getattr(self.mixture, f.name) for f in fields(Mixture)}
        optional = {"centre": self.pca_mean, "components": self.pca_axes}
        return tensors | {name: tensor for name, tensor in optional.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str) -> ProjectedMixture:
        """Build a mixture from the result of its method ``tensors``, with ``prefix`` in front of each name."""
        mixture = Mixture(**{f.name: tensors[f"{prefix}mixture.{f.name}"] for f in fields(Mixture)})
        return cls(mixture, tensors.get(f"{prefix}centre"), tensors.get(f"{prefix}components"))


class HglmmEncoder(CaptionEncoder):
    """An encoder that computes Fisher vectors of a caption's words on mixtures, and projects them on principal components.

    Word vectors are normalised to unit length, multiplied by the unmixing matrix of the independent components (without
    subtracting the mean, as in the authors' code), normalised again, and scaled to the length ``scale``. A Fisher vector is
    replaced by its signed square root and normalised before the projection. The vectors of several mixtures are concatenated
    (see :class:`HglmmConfig`).
    """

    def __init__(
        self,
        word_vectors: WordVectors,
        unmixing: Float[Tensor, "D dim"] | None,
        scale: float,
        mixtures: Sequence[ProjectedMixture],
        is_projection_normalized: bool,
        device: torch.device,
    ) -> None:
        self.word_vectors, self.unmixing, self.scale, self.projected_mixtures = word_vectors, unmixing, scale, mixtures
        self.is_projection_normalized = is_projection_normalized
        self.dim = sum(mixture.dim for mixture in mixtures)
        self._table = _transform_word_vectors(word_vectors, unmixing, scale).float().to(device)
        self._mixtures_on_device = [mixture.to(self._table) for mixture in mixtures]

    @classmethod
    def fit_to_corpus(cls, config: HglmmConfig, corpus: CaptionCorpus, word_file: Path | None, device: str) -> HglmmEncoder:
        """Fit independent components and mixtures to a sample of words, then principal components to the training captions.

        If the feature has a row per phrase, the principal components are fitted to distinct phrases. Otherwise they would
        mainly describe the few phrases that occur in many captions, such as *a man*.

        Raises UserError if there are too few words for a mixture.
        """
        kept, sample = prepare_word_vectors(corpus, config, word_file, config.ica_words)
        n_sampled, dim = sample.vectors.shape
        if n_sampled <= dim:
            raise UserError(
                f"{n_sampled} words with vectors of length {dim} are too few for a mixture: "
                "use shorter vectors (trained_dim) or a file with more words (--words)"
            )
        texts = list(dict.fromkeys(map(tuple, corpus.fit_texts))) if config.of == "phrases" else corpus.fit_texts
        return cls.fit(kept, texts, config, pick_device(device), sample)

    @classmethod
    def fit(
        cls, word_vectors: WordVectors, captions: TokenLists, config: HglmmConfig, device: torch.device, sample: WordVectors
    ) -> HglmmEncoder:
        """Fit independent components and mixtures to the word vectors ``sample``, and principal components to ``captions``.

        The encoder keeps ``word_vectors`` and ignores words without a vector in this table.
        """
        unmixing = _fit_unmixing_matrix(sample.vectors, config) if config.ica else None
        samples = _transform_word_vectors(sample, unmixing, config.scale).double().to(device)
        parts = []
        for kind in config.mixtures:
            log.info("fitting %d centres (%s) to %d words", config.centres, kind, len(samples))
            mixture = fit_mixture(samples, draw_initial_mixture(samples, config.centres, config.seed), config.iterations, kind)
            parts.append(ProjectedMixture(mixture.to(torch.zeros(0, dtype=torch.float64))))
        unreduced = cls(word_vectors, unmixing, config.scale, parts, False, device)
        if config.pca is None:
            return unreduced
        rng = np.random.default_rng(config.seed)
        if config.pca_captions is not None and config.pca_captions < len(captions):
            captions = [captions[k] for k in np.sort(rng.permutation(len(captions))[: config.pca_captions])]
        parts = [
            ProjectedMixture(
                part.mixture, *fit_principal_components(unreduced, part.mixture, captions, config.pca, config.chunk)
            )
            for part in parts
        ]
        return cls(word_vectors, unmixing, config.scale, parts, config.normalize, device)

    def encode(self, captions: TokenLists) -> Float[Tensor, "n dim"]:
        rows, lengths = self.word_vectors.find_word_rows(captions)
        vectors = torch.cat([self._encode_on_mixture(mixture, rows, lengths) for mixture in self._mixtures_on_device], dim=1)
        vectors[lengths.to(vectors.device) == 0] = 0
        return vectors.cpu()

    def compute_normalized_fisher_vectors(self, mixture: Mixture, rows: Tensor, lengths: Tensor) -> Float[Tensor, "n two_K_D"]:
        """Return the signed square roots of the Fisher vectors of n sets of words on one mixture, normalised to unit length.

        rows : row of each word in the table of word vectors, one set after the other
        lengths : (n,) number of words of each set
        """
        table = self._table
        return power_normalize(
            compute_fisher_vectors(table, rows.to(table.device), lengths.to(table.device), mixture.to(table))
        )

    def iter_normalized_fisher_vectors(
        self, mixture: Mixture, captions: TokenLists, chunk: int
    ) -> Iterator[Float[Tensor, "n two_K_D"]]:
        """Yield normalised Fisher vectors for blocks of ``chunk`` captions; captions without a known word are left out."""
        for k in range(0, len(captions), chunk):
            rows, lengths = self.word_vectors.find_word_rows(captions[k : k + chunk])
            yield self.compute_normalized_fisher_vectors(mixture, rows, lengths[lengths > 0])

    def _encode_on_mixture(self, projected: ProjectedMixture, rows: Tensor, lengths: Tensor) -> Float[Tensor, "n dim"]:
        """Return the vectors of n captions on one mixture.

        rows : row of each word in the table of word vectors, one caption after the other
        lengths : (n,) number of words of each caption
        """
        vectors = self.compute_normalized_fisher_vectors(projected.mixture, rows, lengths)
        if projected.pca_mean is None or projected.pca_axes is None:
            return vectors
        vectors = (vectors - projected.pca_mean) @ projected.pca_axes.T
        return normalize(vectors) if self.is_projection_normalized else vectors

    def tensors(self) -> dict[str, Tensor]:
        tensors = self.word_vectors.tensors()
        tensors |= {"scale": torch.tensor(self.scale), "normalized": torch.tensor(self.is_projection_normalized)}
        tensors |= {} if self.unmixing is None else {"unmixing": self.unmixing}
        for k, part in enumerate(self.projected_mixtures):
            tensors |= {_build_mixture_prefix(k) + name: tensor for name, tensor in part.tensors().items()}
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> HglmmEncoder:
        n_parts = sum(name.endswith("mixture.priors") for name in tensors)
        parts = [ProjectedMixture.from_tensors(tensors, _build_mixture_prefix(k)) for k in range(n_parts)]
        scale, is_normalized = float(tensors["scale"]), bool(tensors["normalized"])
        return cls(WordVectors.from_tensors(tensors), tensors.get("unmixing"), scale, parts, is_normalized, device)


def fit_principal_components(
    encoder: HglmmEncoder, mixture: Mixture, captions: TokenLists, n_components: int, chunk: int
) -> tuple[Float[Tensor, " dim"], Float[Tensor, "n_components dim"]]:
    """Return the mean and the principal axes of the captions' Fisher vectors on one mixture.

    The covariance (18,000 x 18,000 float32 are 1.3 GB), the axes and ``chunk`` Fisher vectors must fit into memory. The sign
    of each axis is chosen so that the coordinate with the largest absolute value is positive. Raises UserError if fewer than
    two captions have a known word.
    """
    device, dim = encoder._table.device, 2 * mixture.mean.numel()
    total, count = torch.zeros(dim, dtype=torch.float64, device=device), 0
    for block in encoder.iter_normalized_fisher_vectors(mixture, captions, chunk):  # a second pass computes the covariance
        total += block.sum(0, dtype=torch.float64)
        count += len(block)
    if count < 2:
        raise UserError("fewer than two training captions have a known word, so principal components cannot be fitted")
    centre = (total / count).float()
    covariance = torch.zeros(dim, dim, device=device)
    blocks = encoder.iter_normalized_fisher_vectors(mixture, captions, chunk)
    for block in progress_bar(blocks, desc="covariance", total=-(-len(captions) // chunk)):
        block -= centre
        covariance.addmm_(block.T, block, alpha=1 / (count - 1))
    n_components = min(n_components, dim, count - 1)
    log.info("computing %d principal components of %d x %d", n_components, dim, dim)
    _, axes = scipy.linalg.eigh(
        covariance.cpu().numpy().T,  # column-major, so that LAPACK overwrites it and does not copy it
        subset_by_index=(dim - n_components, dim - 1),
        overwrite_a=True,
        check_finite=False,
        driver="evr",
    )
    components = torch.from_numpy(np.ascontiguousarray(axes.T[::-1]))
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    return centre.cpu(), components * largest.sign()


def _fit_unmixing_matrix(vectors: NDArray[np.float32], config: HglmmConfig) -> Float[Tensor, "D dim"]:
    unit = normalize(torch.from_numpy(vectors)).numpy().astype(np.float64)
    log.info("finding %d independent components of %d words", unit.shape[1], len(unit))
    ica = FastICA(whiten="unit-variance", max_iter=config.ica_iterations, random_state=config.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        ica.fit(unit)
    if ica.n_iter_ >= config.ica_iterations:
        log.info("the independent components did not converge in %d iterations", config.ica_iterations)
    return torch.from_numpy(np.asarray(ica.components_, np.float32))


def _transform_word_vectors(word_vectors: WordVectors, unmixing: Tensor | None, scale: float) -> Float[Tensor, "V D"]:
    vectors = normalize(torch.from_numpy(word_vectors.vectors))
    return scale * normalize(vectors @ unmixing.T if unmixing is not None else vectors)


def _build_mixture_prefix(index: int) -> str:
    return f"{index}." if index else ""

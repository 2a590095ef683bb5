"""Hybrid Gaussian-Laplacian mixtures, and Fisher vectors of sets of words on them (Klein et al., CVPR 2015).

Each dimension d of a cluster k is either a Laplacian (``laplacian[k, d]`` is True) with a median and a mean absolute
deviation, or a Gaussian with a mean and a variance. All functions compute in the number type of their input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vse.features.settings.captions import MixtureKind

MIN_SPREAD = 1e-3  # lower limit of deviations and variances
_BLOCK_SAMPLES = 256  # number of samples in one computation, small enough for a processor's cache
_RUN_LENGTH = 32  # number of consecutive samples whose weights are summed in the first step of a weighted median
_MAX_GATHERED_WEIGHTS = 1 << 17  # limit on the weights that are reordered at once for weighted medians


@dataclass(frozen=True)
class Mixture:
    """A mixture of K clusters over D dimensions.

    Laplacian dimensions have the parameters ``median`` and ``deviation``, Gaussian ones ``mean`` and ``variance``.
    """

    priors: Float[Tensor, " K"]
    median: Float[Tensor, "K D"]
    deviation: Float[Tensor, "K D"]
    mean: Float[Tensor, "K D"]
    variance: Float[Tensor, "K D"]
    laplacian: Bool[Tensor, "K D"]

    def to(self, like: Tensor) -> Mixture:
        """Return the mixture with the dtype and device of ``like``. The tensor ``laplacian`` stays Boolean."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(like.device if v.dtype == torch.bool else like) for k, v in values.items()})


def draw_initial_mixture(samples: Float[Tensor, "N D"], n_centres: int, seed: int) -> Mixture:
    """Return a mixture from which expectation maximisation starts; its centres are random samples.

    Deviations and variances are computed over all samples. A dimension is Laplacian with probability 1/2.
    """
    rng = torch.Generator().manual_seed(seed)
    centres = samples[torch.randperm(len(samples), generator=rng)[:n_centres]]
    centres = torch.cat([centres] * math.ceil(n_centres / len(centres)))[:n_centres]
    deviation = (samples - samples.median(0).values).abs().mean(0).clamp(min=MIN_SPREAD)
    variance = samples.var(0, correction=0).clamp(min=MIN_SPREAD)
    return Mixture(
        priors=samples.new_full((n_centres,), 1 / n_centres),
        median=centres.clone(),
        deviation=deviation.expand_as(centres).clone(),
        mean=centres.clone(),
        variance=variance.expand_as(centres).clone(),
        laplacian=torch.randint(2, centres.shape, generator=rng).bool().to(samples.device),
    )


def fit_mixture(samples: Float[Tensor, "N D"], mixture: Mixture, n_iterations: int, kind: MixtureKind = "hybrid") -> Mixture:
    """Run ``n_iterations`` steps of expectation maximisation from ``mixture``, without a test of convergence.

    A step computes the posteriors of all samples. Weighted by these posteriors, the samples give new medians and mean absolute
    deviations, means and variances, and priors. The weighted median is the smallest value such that the samples up to it have
    at least half of the total weight. Each dimension of a hybrid mixture becomes Laplacian or Gaussian, whichever is likelier.
    A ``gaussian`` or ``laplacian`` mixture has dimensions of one type only. A Gaussian mixture keeps its initial medians and
    deviations.

    Pass float64 samples: squared distances are expanded into matrix products, as in scikit-learn, and this loses precision.
    """
    mixture, squares = _set_mixture_kind(mixture, kind), samples.square()
    sorted_samples = None if kind == "gaussian" else _SortedSamples.from_samples(samples)
    for _ in range(n_iterations):
        weights = _compute_posteriors_fast(samples, squares, mixture, kind)
        mixture = _set_mixture_kind(_maximise_likelihood(samples, squares, weights, mixture, sorted_samples), kind)
    return mixture


def compute_posteriors(samples: Float[Tensor, "N D"], mixture: Mixture) -> Float[Tensor, "N K"]:
    """Return the posterior probability of each cluster for each sample; each row sums to 1."""
    return torch.cat([_compute_block_posteriors(block, mixture) for block in torch.split(samples, _BLOCK_SAMPLES)])


def compute_fisher_vectors(
    table: Float[Tensor, "V D"], words: Int[Tensor, " total"], lengths: Int[Tensor, " n"], mixture: Mixture
) -> Float[Tensor, "n two_K_D"]:
    """Return the Fisher vectors of n sets of words.

    table : vectors of all words
    words : the row in ``table`` of each word, one set after the other
    lengths : number of words of each set; an empty set gives zeros

    A vector has the derivatives of the log-likelihood with respect to the locations (medians or means), cluster after
    cluster, then the derivatives with respect to the scales (deviations or variances). With z = (x - location) / spread,
    where the spread is the mean absolute or the standard deviation, and with the posterior probability p of the cluster, a
    word with the vector x adds to the derivative

    - with respect to the location: p sign(z) for a Laplacian, p z for a Gaussian;
    - with respect to the scale: p (abs(z) - 1) for a Laplacian, p (z^2 - 1) / sqrt(2) for a Gaussian.

    The sum over the words is divided by the square roots of the cluster's prior and of the number of words.
    """
    n_clusters, dim = mixture.mean.shape
    out = table.new_zeros(len(lengths), 2, n_clusters, dim)
    if not len(words):
        return out.flatten(1)
    distinct, indices = torch.unique(words, return_inverse=True)
    samples, starts = table[distinct], lengths.cumsum(0) - lengths
    weights = compute_posteriors(samples, mixture) / mixture.priors.clamp(min=torch.finfo(samples.dtype).tiny).sqrt()
    half = torch.where(mixture.laplacian, samples.new_ones(()), samples.new_tensor(0.5).sqrt())
    one = samples.new_ones(())
    for k in range(n_clusters):
        weight, laplacian, z = weights[:, k, None], mixture.laplacian[k], _standardise(samples, mixture, k)
        by_location = weight * torch.where(laplacian, one.copysign(z), z)
        by_scale = torch.where(laplacian, z.abs(), z.square()).sub_(1).mul_(half[k]).mul_(weight)
        for derivative, terms in enumerate((by_location, by_scale)):
            out[:, derivative, k] = torch.nn.functional.embedding_bag(indices, terms, starts, mode="sum")
    return out.flatten(1) / lengths.clamp(min=1).to(out).sqrt()[:, None]


def power_normalize(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Return the signed square roots of all coordinates, normalised to unit length. Zero vectors stay zero."""
    return torch.nn.functional.normalize(vectors.sign() * vectors.abs().sqrt(), dim=1)


def _set_mixture_kind(mixture: Mixture, kind: MixtureKind) -> Mixture:
    if kind == "hybrid":
        return mixture
    return replace(mixture, laplacian=torch.full_like(mixture.laplacian, kind == "laplacian"))


def _standardise(samples: Tensor, mixture: Mixture, k: int) -> Tensor:
    """Return samples minus the median (or mean) of cluster k, divided by the mean absolute (or standard) deviation."""
    laplacian = mixture.laplacian[k]
    location = torch.where(laplacian, mixture.median[k], mixture.mean[k])
    return (samples - location).mul_(torch.where(laplacian, 1 / mixture.deviation[k], mixture.variance[k].rsqrt()))


def _compute_block_posteriors(samples: Tensor, mixture: Mixture) -> Tensor:
    constant = _compute_log_constants(mixture)
    columns = []
    for k in range(len(mixture.priors)):
        z = _standardise(samples, mixture, k)
        columns.append(constant[k] - torch.where(mixture.laplacian[k], z.abs(), z.square() / 2).sum(1))
    return torch.stack(columns, dim=1).softmax(1)


def _compute_log_constants(mixture: Mixture) -> Tensor:
    """Return log(prior / c) for each cluster, where c is the normalising constant of the cluster's density."""
    scale = torch.where(mixture.laplacian, (2 * mixture.deviation).log(), (2 * math.pi * mixture.variance).log() / 2)
    return mixture.priors.log() - scale.sum(1)


def _compute_posteriors_fast(samples: Tensor, squares: Tensor, mixture: Mixture, kind: MixtureKind) -> Float[Tensor, "K N"]:
    """Return the posterior of each cluster for each sample, faster but less exactly than :func:`compute_posteriors`.

    ``squares`` is ``samples ** 2``.
    """
    precision = (~mixture.laplacian) / mixture.variance
    costs = (precision / 2) @ squares.T - (precision * mixture.mean) @ samples.T
    costs += ((precision * mixture.mean.square()).sum(1) / 2 - _compute_log_constants(mixture))[:, None]
    if kind != "gaussian":
        scale = mixture.laplacian / mixture.deviation
        for cost, block in zip(torch.split(costs, _BLOCK_SAMPLES, 1), torch.split(samples, _BLOCK_SAMPLES), strict=True):
            for k in range(len(scale)):
                cost[k] += (block - mixture.median[k]).abs_() @ scale[k]
    return costs.neg_().softmax(0)


def _maximise_likelihood(
    samples: Tensor, squares: Tensor, weights: Tensor, mixture: Mixture, sorted_samples: _SortedSamples | None
) -> Mixture:
    """Return the mixture that maximises the likelihood, given the posteriors ``weights`` of the samples (an EM step).

    ``squares`` is ``samples ** 2``. ``sorted_samples`` serve for the medians; None for a Gaussian mixture, which needs none.
    """
    totals = weights.sum(1)
    safe_totals = totals.clamp(min=torch.finfo(samples.dtype).tiny)[:, None]
    means = weights @ samples / safe_totals
    squared = (weights @ squares / safe_totals - means.square()).clamp(min=0)
    variances = squared.clamp(min=MIN_SPREAD)
    gaussian = replace(mixture, priors=totals / totals.sum(), mean=means, variance=variances)
    if sorted_samples is None:
        return gaussian
    medians, absolute = sorted_samples.compute_medians(weights), torch.zeros_like(means)
    for block, weight in zip(torch.split(samples, _BLOCK_SAMPLES), torch.split(weights, _BLOCK_SAMPLES, 1), strict=True):
        for k in range(len(totals)):
            absolute[k] += weight[k] @ (block - medians[k]).abs_()
    absolute /= safe_totals
    deviations = absolute.clamp(min=MIN_SPREAD)
    laplacian_likelihoods = -(2 * deviations).log() - absolute / deviations
    gaussian_likelihoods = ((2 * math.pi * variances).log() + squared / variances) / -2
    return replace(gaussian, median=medians, deviation=deviations, laplacian=laplacian_likelihoods > gaussian_likelihoods)


@dataclass(frozen=True)
class _SortedSamples:
    """Samples, sorted in each dimension and divided into runs of ``_RUN_LENGTH`` samples.

    indices : sample indices in ascending order of the values; the padding of the last run has the index N (number of samples)
    values : values in ascending order; the padding repeats the last value
    """

    indices: Int[Tensor, "D n_runs run"]
    values: Float[Tensor, "D n_padded"]

    @classmethod
    def from_samples(cls, samples: Float[Tensor, "N D"]) -> _SortedSamples:
        values, indices = samples.T.contiguous().sort(dim=1, stable=True)
        n_missing = -len(samples) % _RUN_LENGTH
        values = torch.cat([values, values[:, -1:].expand(-1, n_missing)], dim=1)
        indices = torch.nn.functional.pad(indices, (0, n_missing), value=len(samples))
        return cls(indices.reshape(len(indices), -1, _RUN_LENGTH), values)

    def compute_medians(self, weights: Float[Tensor, "K N"]) -> Float[Tensor, "K D"]:
        """Return the weighted median of each dimension for the weights of each cluster.

        It is the smallest value such that the samples up to it have at least half of the total weight.
        """
        weights = torch.nn.functional.pad(weights, (0, 1)).T.contiguous()
        medians, block = [], max(1, _MAX_GATHERED_WEIGHTS // weights.numel())
        for indices, values in zip(torch.split(self.indices, block), torch.split(self.values, block), strict=True):
            parts = weights[indices]  # (dimension, run, position in the run, cluster)
            reached = parts.sum(2).cumsum(1)
            half = reached[:, -1:] / 2
            run = (reached < half).sum(1, keepdim=True)
            before = torch.where(run > 0, reached.gather(1, (run - 1).clamp(min=0)), 0)
            inside = parts.gather(1, run[:, :, None].expand(-1, -1, _RUN_LENGTH, -1))[:, 0].cumsum(1)
            position = run[:, 0] * _RUN_LENGTH + (before + inside < half).sum(1).clamp(max=_RUN_LENGTH - 1)
            medians.append(values.gather(1, position))
        return torch.cat(medians).T.contiguous()

"""Hybrid Gaussian-Laplacian mixtures, and Fisher vectors of sets of words on them (Klein et al., CVPR 2015).

Each dimension d of a cluster k is either a Laplacian (``laplacian[k, d]`` is true) with a median and a mean absolute
deviation, or a Gaussian with a mean and a variance. All functions compute in the type of their input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vse.features.settings.texts import MixtureKind

FLOOR = 1e-3  # minimum of deviations and variances
_BLOCK = 256  # number of samples whose deviations are computed at once; they fit into a processor's cache
_RUN = 32  # number of consecutive samples whose weights are summed in the first step of a weighted median
_MEDIAN_BLOCK = 1 << 17  # number of weights that are gathered at once, in the order of the samples


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
        """Return the mixture with the dtype and device of ``like``; the tensor ``laplacian`` stays Boolean."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(like.device if v.dtype == torch.bool else like) for k, v in values.items()})


def initial_mixture(samples: Float[Tensor, "N D"], n_centres: int, seed: int) -> Mixture:
    """Return a mixture from which expectation maximisation starts; its centres are random samples.

    Deviations and variances are computed over all samples. A dimension is Laplacian with probability 1/2.
    """
    rng = torch.Generator().manual_seed(seed)
    centres = samples[torch.randperm(len(samples), generator=rng)[:n_centres]]
    centres = torch.cat([centres] * math.ceil(n_centres / len(centres)))[:n_centres]
    deviation = (samples - samples.median(0).values).abs().mean(0).clamp(min=FLOOR)
    variance = samples.var(0, correction=0).clamp(min=FLOOR)
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

    A step computes posteriors, then weighted medians and mean absolute deviations, means and variances, and priors. The
    weighted median is the first sample in ascending order that reaches half of the weight. Each dimension of a hybrid mixture
    then becomes Laplacian or Gaussian, whichever is likelier; in a ``gaussian`` or ``laplacian`` mixture all dimensions keep
    their type. The medians and deviations of a Gaussian mixture stay unchanged.

    Squared distances are expanded into matrix products, as in scikit-learn. This loses precision, so use float64.
    """
    mixture, squares = _with_kind(mixture, kind), samples.square()
    ordered = None if kind == "gaussian" else _SortedSamples.sort(samples)
    for _ in range(n_iterations):
        weights = _fitting_posteriors(samples, squares, mixture, kind)
        mixture = _with_kind(_maximise(samples, squares, weights, mixture, ordered), kind)
    return mixture


def posteriors(samples: Float[Tensor, "N D"], mixture: Mixture) -> Float[Tensor, "N K"]:
    """Return the posterior probability of each cluster for each sample; each row sums to 1."""
    return torch.cat([_block_posteriors(block, mixture) for block in torch.split(samples, _BLOCK)])


def fisher_vectors(
    table: Float[Tensor, "V D"], words: Int[Tensor, " total"], lengths: Int[Tensor, " n"], mixture: Mixture
) -> Float[Tensor, "n two_K_D"]:
    """Return the Fisher vectors of n sets of words.

    table : vectors of all words
    words : the row in ``table`` of each word, one set after the other
    lengths : number of words of each set; an empty set gives zeros

    A vector has the derivatives of the log-likelihood by the locations (medians or means), cluster by cluster, then the
    derivatives by the scales (deviations or variances). A derivative is the sum of one term per word, divided by the square
    root of the number of words. The term is multiplied by the posterior probability of the cluster, and divided by the square
    root of the cluster's prior. For the variance of a Gaussian, it is also divided by the square root of 2.
    """
    n_clusters, dim = mixture.mean.shape
    out = table.new_zeros(len(lengths), 2, n_clusters, dim)
    if not len(words):
        return out.flatten(1)
    distinct, indices = torch.unique(words, return_inverse=True)
    samples, starts = table[distinct], lengths.cumsum(0) - lengths
    weights = posteriors(samples, mixture) / mixture.priors.clamp(min=torch.finfo(samples.dtype).tiny).sqrt()
    half = torch.where(mixture.laplacian, samples.new_ones(()), samples.new_tensor(0.5).sqrt())
    one = samples.new_ones(())
    for k in range(n_clusters):
        weight, laplacian, z = weights[:, k, None], mixture.laplacian[k], _standardised(samples, mixture, k)
        by_location = weight * torch.where(laplacian, one.copysign(z), z)
        by_scale = torch.where(laplacian, z.abs(), z.square()).sub_(1).mul_(half[k]).mul_(weight)
        for derivative, terms in enumerate((by_location, by_scale)):
            out[:, derivative, k] = torch.nn.functional.embedding_bag(indices, terms, starts, mode="sum")
    return out.flatten(1) / lengths.clamp(min=1).to(out).sqrt()[:, None]


def power_normalize(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Take the signed square root of every coordinate, then normalise to unit length; zero vectors stay zero."""
    return torch.nn.functional.normalize(vectors.sign() * vectors.abs().sqrt(), dim=1)


def _with_kind(mixture: Mixture, kind: MixtureKind) -> Mixture:
    if kind == "hybrid":
        return mixture
    return replace(mixture, laplacian=torch.full_like(mixture.laplacian, kind == "laplacian"))


def _standardised(samples: Tensor, mixture: Mixture, k: int) -> Tensor:
    """Return samples minus the median (or mean) of cluster k, divided by its mean absolute (or standard) deviation."""
    laplacian = mixture.laplacian[k]
    location = torch.where(laplacian, mixture.median[k], mixture.mean[k])
    return (samples - location).mul_(torch.where(laplacian, 1 / mixture.deviation[k], mixture.variance[k].rsqrt()))


def _block_posteriors(samples: Tensor, mixture: Mixture) -> Tensor:
    constant = _log_constants(mixture)
    columns = []
    for k in range(len(mixture.priors)):
        z = _standardised(samples, mixture, k)
        columns.append(constant[k] - torch.where(mixture.laplacian[k], z.abs(), z.square() / 2).sum(1))
    return torch.stack(columns, dim=1).softmax(1)


def _log_constants(mixture: Mixture) -> Tensor:
    """Return, for each cluster, the logarithm of its prior divided by the normalising constant of its density."""
    scale = torch.where(mixture.laplacian, (2 * mixture.deviation).log(), (2 * math.pi * mixture.variance).log() / 2)
    return mixture.priors.log() - scale.sum(1)


def _fitting_posteriors(samples: Tensor, squares: Tensor, mixture: Mixture, kind: MixtureKind) -> Float[Tensor, "K N"]:
    precision = (~mixture.laplacian) / mixture.variance
    costs = (precision / 2) @ squares.T - (precision * mixture.mean) @ samples.T
    costs += ((precision * mixture.mean.square()).sum(1) / 2 - _log_constants(mixture))[:, None]
    if kind != "gaussian":
        scale = mixture.laplacian / mixture.deviation
        for cost, block in zip(torch.split(costs, _BLOCK, 1), torch.split(samples, _BLOCK), strict=True):
            for k in range(len(scale)):
                cost[k] += (block - mixture.median[k]).abs_() @ scale[k]
    return costs.neg_().softmax(0)


def _maximise(samples: Tensor, squares: Tensor, weights: Tensor, mixture: Mixture, ordered: _SortedSamples | None) -> Mixture:
    """Return the likeliest mixture, given the posteriors ``weights`` (K, N); ``ordered`` is None for a Gaussian mixture."""
    totals = weights.sum(1)
    heavy = totals.clamp(min=torch.finfo(samples.dtype).tiny)[:, None]
    means = weights @ samples / heavy
    squared = (weights @ squares / heavy - means.square()).clamp(min=0)
    variances = squared.clamp(min=FLOOR)
    gaussian = replace(mixture, priors=totals / totals.sum(), mean=means, variance=variances)
    if ordered is None:
        return gaussian
    medians, absolute = ordered.weighted_medians(weights), torch.zeros_like(means)
    for block, weight in zip(torch.split(samples, _BLOCK), torch.split(weights, _BLOCK, 1), strict=True):
        for k in range(len(totals)):
            absolute[k] += weight[k] @ (block - medians[k]).abs_()
    absolute /= heavy
    deviations = absolute.clamp(min=FLOOR)
    laplace = -(2 * deviations).log() - absolute / deviations
    gauss = ((2 * math.pi * variances).log() + squared / variances) / -2
    return replace(gaussian, median=medians, deviation=deviations, laplacian=laplace > gauss)


@dataclass(frozen=True)
class _SortedSamples:
    """Samples, sorted in each dimension and divided into runs of ``_RUN`` samples.

    indices : index of the sample at each position of the order; N, the number of samples, for padding of the last run
    values : values in ascending order, padded with the last one
    """

    indices: Int[Tensor, "D n_runs run"]
    values: Float[Tensor, "D n_padded"]

    @classmethod
    def sort(cls, samples: Float[Tensor, "N D"]) -> _SortedSamples:
        values, indices = samples.T.contiguous().sort(dim=1, stable=True)
        n_missing = -len(samples) % _RUN
        values = torch.cat([values, values[:, -1:].expand(-1, n_missing)], dim=1)
        indices = torch.nn.functional.pad(indices, (0, n_missing), value=len(samples))
        return cls(indices.reshape(len(indices), -1, _RUN), values)

    def weighted_medians(self, weights: Float[Tensor, "K N"]) -> Float[Tensor, "K D"]:
        """Return, for each cluster and dimension, the first sample in order that reaches half of the weight."""
        weights = torch.nn.functional.pad(weights, (0, 1)).T.contiguous()
        medians, block = [], max(1, _MEDIAN_BLOCK // weights.numel())
        for indices, values in zip(torch.split(self.indices, block), torch.split(self.values, block), strict=True):
            parts = weights[indices]  # (dimension, run, position in the run, cluster)
            reached = parts.sum(2).cumsum(1)
            half = reached[:, -1:] / 2
            run = (reached < half).sum(1, keepdim=True)
            before = torch.where(run > 0, reached.gather(1, (run - 1).clamp(min=0)), 0)
            inside = parts.gather(1, run[:, :, None].expand(-1, -1, _RUN, -1))[:, 0].cumsum(1)
            position = run[:, 0] * _RUN + (before + inside < half).sum(1).clamp(max=_RUN - 1)
            medians.append(values.gather(1, position))
        return torch.cat(medians).T.contiguous()

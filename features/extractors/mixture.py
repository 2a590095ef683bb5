"""Hybrid Gaussian-Laplacian mixtures, and Fisher vectors of sets of words on them (Klein et al., CVPR 2015).

In each cluster k each dimension d is either a Laplacian, with median m and mean deviation s, or a Gaussian, with mean mu
and variance sigma; ``laplacian[k, d]`` says which. Where it is false (true) throughout, the mixture is a Gaussian
(Laplacian) one with diagonal covariances. All functions are batched tensor code in the type of their input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vse.features.settings.texts import MixtureKind

FLOOR = 1e-3  # of deviations and variances
_BLOCK = 256  # samples whose deviations are held at once: as many as stay in a processor's cache
_RUN = 32  # samples whose weight is added up before half of all is looked for
_MEDIAN_BLOCK = 1 << 17  # weights that are put into order at once


@dataclass(frozen=True)
class Mixture:
    """K clusters over D dimensions: ``priors`` (K,), and (K, D) each of the others."""

    priors: Float[Tensor, " K"]
    median: Float[Tensor, "K D"]
    deviation: Float[Tensor, "K D"]
    mean: Float[Tensor, "K D"]
    variance: Float[Tensor, "K D"]
    laplacian: Bool[Tensor, "K D"]

    def to(self, like: Tensor) -> Mixture:
        """The same mixture in the type and on the device of ``like``; which dimensions are Laplacian stays Boolean."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(like.device if v.dtype == torch.bool else like) for k, v in values.items()})


def initial_mixture(samples: Float[Tensor, "N D"], n_centres: int, seed: int) -> Mixture:
    """Where EM starts: samples drawn as centres, the deviations of all samples, and a coin for each dimension."""
    rng = torch.Generator().manual_seed(seed)
    drawn = samples[torch.randperm(len(samples), generator=rng)[:n_centres]]
    drawn = torch.cat([drawn] * math.ceil(n_centres / len(drawn)))[:n_centres]
    deviation = (samples - samples.median(0).values).abs().mean(0).clamp(min=FLOOR)
    variance = samples.var(0, correction=0).clamp(min=FLOOR)
    return Mixture(
        priors=samples.new_full((n_centres,), 1 / n_centres),
        median=drawn.clone(),
        deviation=deviation.expand_as(drawn).clone(),
        mean=drawn.clone(),
        variance=variance.expand_as(drawn).clone(),
        laplacian=torch.randint(2, drawn.shape, generator=rng).bool().to(samples.device),
    )


def fit_mixture(samples: Float[Tensor, "N D"], mixture: Mixture, n_iterations: int, kind: MixtureKind = "hybrid") -> Mixture:
    """``n_iterations`` steps of expectation maximisation from ``mixture``; there is no test of convergence.

    A step: posteriors; medians (the first sample, in order, at which half the weight is reached) and mean deviations;
    means and variances; priors; then each dimension of a cluster becomes what is likelier under the new parameters.
    In a mixture that is ``gaussian`` or ``laplacian`` all dimensions are that from the start and stay it; medians and mean
    deviations of a Gaussian mixture stay as they are, because nothing reads them.

    What squares are added up is expanded into matrix products, as in scikit-learn: use double precision.
    """
    mixture, squares = _of_kind(mixture, kind), samples.square()
    ranked = None if kind == "gaussian" else _Ranked.of(samples)
    for _ in range(n_iterations):
        weights = _fitting_posteriors(samples, squares, mixture, kind)
        mixture = _of_kind(_maximised(samples, squares, weights, mixture, ranked), kind)
    return mixture


def posteriors(samples: Float[Tensor, "N D"], mixture: Mixture) -> Float[Tensor, "N K"]:
    """How likely each cluster is to have made each sample; rows sum to 1."""
    return torch.cat([_posteriors(block, mixture) for block in torch.split(samples, _BLOCK)])


def fisher_vectors(
    table: Float[Tensor, "V D"], words: Int[Tensor, " total"], lengths: Int[Tensor, " n"], mixture: Mixture
) -> Float[Tensor, "n two_K_D"]:
    """Fisher vectors of n sets of words: ``words`` are rows of ``table``, set after set; a set of none gives zeros.

    First the derivatives by the places (medians or means), cluster by cluster, then those by the deviations. Each is the
    sum over the words, times their posterior over the square root of the cluster's prior (and of 2 for a Gaussian's
    variance) and over the square root of their number. Words that occur more than once are worked out once.
    """
    n_clusters, dim = mixture.mean.shape
    out = table.new_zeros(len(lengths), 2, n_clusters, dim)
    if not len(words):
        return out.flatten(1)
    distinct, places = torch.unique(words, return_inverse=True)
    samples, starts = table[distinct], lengths.cumsum(0) - lengths
    weights = posteriors(samples, mixture) / mixture.priors.clamp(min=torch.finfo(samples.dtype).tiny).sqrt()
    half = torch.where(mixture.laplacian, samples.new_ones(()), samples.new_tensor(0.5).sqrt())
    one = samples.new_ones(())
    for k in range(n_clusters):
        weight, laplacian, z = weights[:, k, None], mixture.laplacian[k], _standardised(samples, mixture, k)
        place = weight * torch.where(laplacian, one.copysign(z), z)
        spread = torch.where(laplacian, z.abs(), z.square()).sub_(1).mul_(half[k]).mul_(weight)
        for derivative, added in enumerate((place, spread)):
            out[:, derivative, k] = torch.nn.functional.embedding_bag(places, added, starts, mode="sum")
    return out.flatten(1) / lengths.clamp(min=1).to(out).sqrt()[:, None]


def power_normalize(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """The signed square root of every coordinate, then unit length; zeros stay zeros."""
    return torch.nn.functional.normalize(vectors.sign() * vectors.abs().sqrt(), dim=1)


def _of_kind(mixture: Mixture, kind: MixtureKind) -> Mixture:
    """The same mixture with all dimensions ``gaussian`` or ``laplacian``; or, if ``hybrid``, as it is."""
    if kind == "hybrid":
        return mixture
    return replace(mixture, laplacian=torch.full_like(mixture.laplacian, kind == "laplacian"))


def _standardised(samples: Tensor, mixture: Mixture, k: int) -> Tensor:
    """Samples less the places of cluster k, over its deviations: medians and mean deviations, or means and standard ones."""
    laplacian = mixture.laplacian[k]
    place = torch.where(laplacian, mixture.median[k], mixture.mean[k])
    return (samples - place).mul_(torch.where(laplacian, 1 / mixture.deviation[k], mixture.variance[k].rsqrt()))


def _posteriors(samples: Tensor, mixture: Mixture) -> Tensor:
    constant = _log_constants(mixture)
    columns = []
    for k in range(len(mixture.priors)):
        z = _standardised(samples, mixture, k)
        columns.append(constant[k] - torch.where(mixture.laplacian[k], z.abs(), z.square() / 2).sum(1))
    return torch.stack(columns, dim=1).softmax(1)


def _log_constants(mixture: Mixture) -> Tensor:
    """Per cluster the logarithm of the prior and of what its density is normalised by."""
    scale = torch.where(mixture.laplacian, (2 * mixture.deviation).log(), (2 * math.pi * mixture.variance).log() / 2)
    return mixture.priors.log() - scale.sum(1)


def _fitting_posteriors(samples: Tensor, squares: Tensor, mixture: Mixture, kind: MixtureKind) -> Float[Tensor, "K N"]:
    """:func:`posteriors`, cluster by cluster, by products of matrices but for the Laplacian dimensions."""
    precision = (~mixture.laplacian) / mixture.variance
    costs = (precision / 2) @ squares.T - (precision * mixture.mean) @ samples.T
    costs += ((precision * mixture.mean.square()).sum(1) / 2 - _log_constants(mixture))[:, None]
    if kind != "gaussian":
        scale = mixture.laplacian / mixture.deviation
        for cost, block in zip(torch.split(costs, _BLOCK, 1), torch.split(samples, _BLOCK), strict=True):
            for k in range(len(scale)):
                cost[k] += (block - mixture.median[k]).abs_() @ scale[k]
    return costs.neg_().softmax(0)


def _maximised(samples: Tensor, squares: Tensor, weights: Tensor, mixture: Mixture, ranked: _Ranked | None) -> Mixture:
    """What is likeliest under the posteriors (K, N); without ``ranked`` samples the mixture is a Gaussian one."""
    totals = weights.sum(1)
    heavy = totals.clamp(min=torch.finfo(samples.dtype).tiny)[:, None]
    means = weights @ samples / heavy
    squared = (weights @ squares / heavy - means.square()).clamp(min=0)
    variances = squared.clamp(min=FLOOR)
    moved = replace(mixture, priors=totals / totals.sum(), mean=means, variance=variances)
    if ranked is None:
        return moved
    medians, absolute = ranked.weighted_medians(weights), torch.zeros_like(means)
    for block, weight in zip(torch.split(samples, _BLOCK), torch.split(weights, _BLOCK, 1), strict=True):
        for k in range(len(totals)):
            absolute[k] += weight[k] @ (block - medians[k]).abs_()
    absolute /= heavy
    deviations = absolute.clamp(min=FLOOR)
    laplace = -(2 * deviations).log() - absolute / deviations
    gauss = ((2 * math.pi * variances).log() + squared / variances) / -2
    return replace(moved, median=medians, deviation=deviations, laplacian=laplace > gauss)


@dataclass(frozen=True)
class _Ranked:
    """Samples in the order of each dimension, filled up to whole runs with the last one, which ``places`` then do not name."""

    places: Int[Tensor, "D n_runs run"]
    values: Float[Tensor, "D n_filled"]

    @classmethod
    def of(cls, samples: Float[Tensor, "N D"]) -> _Ranked:
        values, places = samples.T.contiguous().sort(dim=1, stable=True)
        missing = -len(samples) % _RUN
        values = torch.cat([values, values[:, -1:].expand(-1, missing)], dim=1)
        places = torch.nn.functional.pad(places, (0, missing), value=len(samples))
        return cls(places.reshape(len(places), -1, _RUN), values)

    def weighted_medians(self, weights: Float[Tensor, "K N"]) -> Float[Tensor, "K D"]:
        """Per cluster and dimension, the first of the samples in order at which half the weight is reached.

        The run in which that is comes first, by the sums of runs; then the place in the run.
        """
        weights = torch.nn.functional.pad(weights, (0, 1)).T.contiguous()
        medians, block = [], max(1, _MEDIAN_BLOCK // weights.numel())
        for places, values in zip(torch.split(self.places, block), torch.split(self.values, block), strict=True):
            parts = weights[places]  # dimension, run, place in the run, cluster
            reached = parts.sum(2).cumsum(1)
            half = reached[:, -1:] / 2
            run = (reached < half).sum(1, keepdim=True)
            before = torch.where(run > 0, reached.gather(1, (run - 1).clamp(min=0)), 0)
            inside = parts.gather(1, run[:, :, None].expand(-1, -1, _RUN, -1))[:, 0].cumsum(1)
            place = run[:, 0] * _RUN + (before + inside < half).sum(1).clamp(max=_RUN - 1)
            medians.append(values.gather(1, place))
        return torch.cat(medians).T.contiguous()

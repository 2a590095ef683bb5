"""Solvers that match regions with phrases: networks trained by Algorithm 1 of the two-branch paper, and a CCA baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from vse.features.backbones.networks import autocast
from vse.pipeline.errors import UserError
from vse.pipeline.progress import progress_bar
from vse.training.data.images import Indices
from vse.training.losses.base import Loss, PairLoss
from vse.training.losses.ranking import RankingLoss
from vse.training.phrases.batches import (
    CandidateSampler,
    PairSampler,
    SamplingSettings,
    TripletBatch,
    TripletSampler,
    compute_pair_cost,
    compute_triplet_cost,
)
from vse.training.phrases.task import PhraseSettings, PhraseSolver, PhraseTask
from vse.training.solvers.base import Solver, TrainingTask
from vse.training.solvers.cca import CcaSolver, CommonCcaSettings, PairBlock
from vse.training.solvers.encode import seed_random_numbers
from vse.training.solvers.epochs import GradientSolver

_CHANCE_FACTOR = 1.05  # a model counts as no better than chance up to this factor times the rsum of random scores
_OUT_OF_MEMORY_ADVICE = (
    "--set solver.candidates=50 uses fewer negatives of an image, train.sampling=by_image fewer images in a batch; or lower "
    "train.batch_size, or --set train.features_in_memory=false"
)
_IMAGES_PER_BLOCK = 32  # images whose pairs are in memory at once


class PhraseGradientSettings(PhraseSettings, SamplingSettings):
    """The settings of a solver that matches regions with phrases by gradient descent (two-branch paper, section 4).

    A ranking loss, such as ``top``, trains on triplets, like the paper's embedding network. The loss ``logistic`` trains on
    pairs, like the paper's similarity network.
    """

    name: Literal["phrases"] = "phrases"

    def build(self, task: TrainingTask) -> Solver:
        assert isinstance(task, PhraseTask)
        return PhraseTrainer(task, self)


class PhraseTrainer(GradientSolver, PhraseSolver):
    """A solver that trains a model by gradients on batches of region-phrase pairs."""

    task: PhraseTask
    out_of_memory_advice = _OUT_OF_MEMORY_ADVICE

    def __init__(self, task: PhraseTask, settings: PhraseGradientSettings) -> None:
        if settings.neighbours and not task.loss.is_ranking:
            raise UserError(f"solver.neighbours adds triplets, but the loss {task.loss.name} does not use them")
        if (task.loss.lambda3 or task.loss.lambda4) and not settings.neighbours:
            raise UserError("loss.lambda3 and lambda4 require neighbours in a batch: --set solver.neighbours=true")
        super().__init__(task)
        arguments = task.train_split.phrases, task.train_split.region_inputs.candidates, task.truth_indices, settings
        self._triplet_sampler, self._pair_sampler = TripletSampler(*arguments), PairSampler(*arguments)

    @property
    def near_chance_rsum(self) -> float:
        return _CHANCE_FACTOR * self.task.val_split.compute_random_rsum()

    def batches(self, epoch: int) -> Sequence[Indices]:
        settings, pairs = self.settings, self.task.train_split.phrases
        return settings.sampling.build_epoch_batches(pairs.image_indices, settings.batch_size, self.task.seed, epoch)

    def train_batches(self, batches: Sequence[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        loss = self.task.select_loss(self.progress.epoch)
        for batch in batches:
            yield self.step(batch, loss)

    def step(self, batch: Indices, loss: Loss) -> tuple[Tensor, Tensor]:
        """Train on one batch. Return the loss of the batch, and the loss that it would have if all embeddings were equal."""
        rng = np.random.default_rng(self.step_seed(0))
        seed_random_numbers(self.step_seed(1), self.device)
        self.clear_old_gradients()
        triplets = isinstance(loss, RankingLoss)
        samples = self._triplet_sampler.sample(batch, rng) if triplets else self._pair_sampler.sample(batch, rng)
        train, similarity = self.task.train_split, self.model.similarity
        with autocast(self.settings.precision, self.device):
            regions = self.model.embed_images(train.region_inputs.read(samples.region_indices))[0]
            phrases = self.model.embed_captions(*train.text_inputs.read(samples.text_indices))[0]
        # Distances and inner products are computed in float32. A similarity network runs in the precision of the step.
        with autocast(self.settings.precision, self.device) if self.model.scores_every_pair else nullcontext():
            if isinstance(samples, TripletBatch):
                assert isinstance(loss, RankingLoss)
                cost = compute_triplet_cost(samples, regions, phrases, similarity, loss)
            else:
                assert isinstance(loss, PairLoss)
                cost = compute_pair_cost(samples, regions, phrases, similarity, loss)
        self.scale_cost(cost.value, loss).backward()  # type: ignore[no-untyped-call]
        if self.ends_update():
            self.update_weights()
        return cost.value.detach().double(), cost.collapsed_value.double()


class PhraseCcaSettings(PhraseSettings, CommonCcaSettings):
    """The settings of canonical correlation analysis (CCA) of region-phrase pairs, the two-branch paper's linear baseline."""

    name: Literal["phrases_cca"] = "phrases_cca"
    uses_loss: ClassVar = False

    def build(self, task: TrainingTask) -> Solver:
        assert isinstance(task, PhraseTask)
        return PhraseCcaSolver(task, self)


class PhraseCcaSolver(CcaSolver, PhraseSolver):
    """A solver by canonical correlation analysis (CCA) of phrases with their positive regions (setting ``positives``)."""

    task: PhraseTask

    def __init__(self, task: PhraseTask, settings: PhraseCcaSettings) -> None:
        super().__init__(task, settings)
        chosen = SamplingSettings(positives=settings.positives, positive_iou=settings.positive_iou)
        self._candidate_sampler = CandidateSampler(
            task.train_split.phrases, task.train_split.region_inputs.candidates, task.truth_indices, chosen
        )

    def iterate_pair_blocks(self) -> Iterator[PairBlock]:
        train, rng = self.task.train_split, np.random.default_rng(0)  # for the sampling of negatives, which CCA ignores
        n_images = len(train.phrases.image_ids)
        with progress_bar(total=n_images, desc="covariances", unit="image") as bar:
            for start in range(0, n_images, _IMAGES_PER_BLOCK):
                stop = min(start + _IMAGES_PER_BLOCK, n_images)
                pairs = np.arange(*np.searchsorted(train.phrases.image_indices, [start, stop]))
                rows, positives = np.arange(len(pairs)), self.task.truth_indices[pairs]
                if self._candidate_sampler.settings.positives == "augmented":
                    positive, _ = self._candidate_sampler.find_positives_and_negatives(pairs, rng)
                    rows, positives = (
                        np.concatenate([rows, positive.pair_rows]),
                        np.concatenate([positives, positive.region_indices]),
                    )
                regions, region_of_pair = np.unique(positives, return_inverse=True)
                if len(pairs):
                    (phrases,) = train.text_inputs.read(train.phrases.text_indices[pairs][rows])
                    yield train.region_inputs.read(regions).cpu().float(), phrases.cpu().float(), region_of_pair
                bar.update(stop - start)

"""Training by gradients on image-caption pairs, optionally against an adversary."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vse.eval import DEFAULT_KS
from vse.features.backbones.device import move_tensor
from vse.features.backbones.networks import autocast
from vse.pipeline.errors import UserError
from vse.training.adversaries.base import Opponent
from vse.training.kinds import BatchVectors
from vse.training.losses.base import Batch, Loss, LossContext, Objective, build_nested_objective
from vse.training.processes.group import synchronise_batch_norms
from vse.training.solvers.base import RetrievalSolver, RetrievalTask
from vse.training.solvers.encode import BatchEmbedder, EncoderPair
from vse.training.solvers.epochs import GradientSolver, Indices
from vse.training.solvers.optimisation import OPTIMIZERS

log = logging.getLogger(__name__)

_MIN_ENTROPY = 0.05  # nats; if the mean entropy of an adversary's samples in an epoch is lower, a warning is logged
_OUT_OF_MEMORY_ADVICE = (
    "lower train.batch_size, or --set train.features_in_memory=false; train.precision=bf16 needs less memory, and so does "
    "images.gradient_checkpointing=true for a CNN that is trained, or model.caption_encoder.gradient_checkpointing=true for a "
    "transformer that is trained"
)


class RetrievalTrainer(GradientSolver, RetrievalSolver):
    """A solver that trains a model by gradients on image-caption pairs, optionally against an adversary."""

    out_of_memory_advice = _OUT_OF_MEMORY_ADVICE

    def __init__(self, task: RetrievalTask) -> None:
        super().__init__(task)
        self.model.train()
        self._encoders = EncoderPair(self.model, task.settings.precision, self.device)
        if self.processes.size > 1 and task.adversary is not None:
            raise UserError(
                "adversary: a single process is required. Each of several processes would embed the negatives of the complete "
                "batch, so that their gradients would be added several times"
            )
        if task.settings.chunk is not None and task.adversary is not None:
            raise UserError("train.chunk: an adversary requires batches that are embedded at once; --set train.chunk=null")
        if self.processes.size > 1:
            synchronise_batch_norms(self._encoders, self.processes)
        if self._encoders.has_batch_norms:
            self._check_batch_norms(self.batches(0))
        self._summing_encoders: nn.Module = self._encoders
        self.adversary = None if task.adversary is None else task.adversary.build(self.build_opponent(task)).to(self.device)
        self._adversary_metric_sums: dict[str, Tensor] = {}  # sums of the adversary's metrics over the pairs of the epoch
        if self.adversary is not None and task.adversary is not None:
            # Adam refuses an empty list; an adversary without weights gets an optimiser with nothing to update.
            weights = [*self.adversary.parameters()] or [nn.Parameter(torch.empty(0, device=self.device))]
            self.adversary_optimizer = OPTIMIZERS["adam"](weights, lr=task.adversary.learning_rate, fused=True)

    def _check_batch_norms(self, batches: Sequence[Indices]) -> None:
        """Raise UserError if a batch normalisation would see only parts of a batch, or no pair in one of the processes."""
        if not self._encoders.has_batch_norms:
            return
        if self.settings.chunk is not None:
            raise UserError(
                "train.chunk: batch normalisation would have other statistics in each part of a batch; --set train.chunk=null"
            )
        smallest = min(map(len, batches))
        if smallest < self.processes.size:
            raise UserError(
                f"a batch has {smallest} pairs for {self.processes.size} processes, but batch normalisation requires one for "
                "each process; change train.batch_size"
            )

    @staticmethod
    def build_opponent(task: RetrievalTask) -> Opponent:
        computation = task.settings.batch_size, task.settings.precision, task.processes.device
        return Opponent(task.model, task.loss, task.pairs, task.image_inputs, task.caption_inputs, *computation)

    @property
    def near_chance_rsum(self) -> float:
        return 2 * 200.0 * sum(DEFAULT_KS) / len(self.val_split.pairs.images)

    def state(self) -> dict[str, Any]:
        adversary_state = {}
        if self.adversary is not None:
            adversary_state = {
                "adversary": self.adversary.state_dict(),
                "adversary_optimizer": self.adversary_optimizer.state_dict(),
                "measures": {name: float(total) for name, total in self._adversary_metric_sums.items()},
            }
        negatives = [self.hard_negatives.finished_rows, self.hard_negatives.epoch_rows] if self.hard_negatives else [[], []]
        return {**super().state(), "negatives": negatives, **adversary_state}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        if self.hard_negatives:
            self.hard_negatives.finished_rows, self.hard_negatives.epoch_rows = state["negatives"]
        if self.adversary is not None:
            self.adversary.load_state_dict(state["adversary"])
            self.adversary_optimizer.load_state_dict(state["adversary_optimizer"])
            self._adversary_metric_sums = {
                name: self._loss_totals.new_tensor(total) for name, total in state["measures"].items()
            }

    def batches(self, epoch: int) -> Sequence[Indices]:
        settings = self.settings
        return settings.sampling.build_epoch_batches(self.pairs.image_indices, settings.batch_size, self.task.seed, epoch)

    def train_batches(self, batches: Sequence[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = self.progress.epoch
        loss = self.task.select_loss(epoch)
        learned = self.learned_scale if loss is self.task.loss else None  # a warm-up loss does not learn its temperature
        objective = loss.build_objective(self.model.similarity, self.settings.compile, learned)
        if loss.nested:
            objective = build_nested_objective(objective, loss.nested)
        self._check_batch_norms(batches)
        self._summing_encoders = self._encoders  # frees the old gradient buffers before new ones are allocated
        self._summing_encoders = self.processes.wrap_encoders(self._encoders)
        shares = [self.processes.select_own_share(batch) for batch in batches]
        stream = self.task.image_inputs.read_batches(shares, self.pairs.image_indices, self.task.seed, epoch)
        if self.adversary is not None and self.progress.step == 0:
            self.adversary.start_epoch(self.model)
        for batch, images in zip(batches, stream, strict=True):
            yield self.step(batch, images, objective)

    def end_epoch(self) -> None:
        if self.hard_negatives:
            self.hard_negatives.end_epoch()
        self._adversary_metric_sums = {}

    def list_losses_that_must_be_finite(self) -> list[tuple[float, str, str]]:
        adversary_loss = (
            float(self._adversary_metric_sums.get("loss", 0.0)),
            "the adversary's loss",
            "a lower adversary.learning_rate",
        )
        return [*super().list_losses_that_must_be_finite(), adversary_loss]

    def step(self, batch: Indices, image_inputs: BatchVectors, objective: Objective) -> tuple[Tensor, Tensor]:
        """Train on one batch. Return the loss of the batch, and the loss that it would have if all embeddings were equal.

        Each of several processes embeds its share of the pairs of the batch.

        ``batch`` : indices of all pairs of the batch.
        ``image_inputs`` : model inputs for the images of the pairs in this process's share.
        ``objective`` : function that computes the loss of the epoch.
        """
        loss = self.task.select_loss(self.progress.epoch)
        self.clear_old_gradients()
        embedder = BatchEmbedder(self._encoders, self._summing_encoders, self.step_seed(1 + self.processes.rank))
        images, captions = embedder.embed(
            self._read_chunks(image_inputs, self.processes.select_own_share(batch)), self.ends_update()
        )
        is_split = self._splits_by_image(loss)
        captions = self.processes.gather_embeddings(captions, len(batch), adds_gradients=is_split)
        images = images if is_split else self.processes.gather_embeddings(images, len(batch))
        texts = self.pairs.text_indices[batch] if self.task.loss.lambda3 else batch
        image_indices, processes = self.pairs.image_indices[batch], self.processes if is_split else None
        pairs = Batch(images, captions, image_indices, texts, pair_indices=batch, processes=processes)
        with autocast(self.settings.precision, self.device) if self.model.scores_every_pair else nullcontext():
            if self.adversary is None:
                cost = objective(pairs, self.step_seed(0))
            else:
                cost, adversary_loss, measures = self.adversary.compute_losses(pairs, self.model, objective, self.step_seed(0))
        if self.adversary is None:
            embedder.backward(self.scale_cost(cost.value, loss))
        else:
            self._set_model_and_adversary_gradients(cost.value, adversary_loss, list(self.adversary.parameters()))
            self._add_adversary_metrics({**measures, "loss": adversary_loss.detach()}, len(batch))
        if self.ends_update():
            other_modules = self.model.similarity, self.learned_scale or nn.Module()
            weights = (weight for module in other_modules for weight in module.parameters())
            self.processes.sum_gradients(weights, are_complete=not is_split)
            self.update_weights()
        if self.adversary is not None:
            self._step_adversary()
        if self.hard_negatives and cost.query_scores is not None:
            self.hard_negatives.add_batch(self.progress.epoch + 1, batch.tolist(), cost.query_scores, self.task.loss.margin)
        return cost.value.detach().double(), cost.collapsed_value.double()

    def _set_model_and_adversary_gradients(
        self, loss: Tensor, adversary_loss: Tensor, adversary_weights: list[nn.Parameter]
    ) -> None:
        """Set the gradients of the model and of the adversary, each from its own loss only."""
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        adversary_gradients = (
            torch.autograd.grad(adversary_loss, adversary_weights, allow_unused=True) if adversary_weights else ()
        )
        for weight, gradient in zip([*weights, *adversary_weights], [*gradients, *adversary_gradients], strict=True):
            weight.grad = gradient

    def _step_adversary(self) -> None:
        assert self.adversary is not None
        assert self.task.adversary is not None
        if (self.progress.step + 1) % self.task.adversary.every == 0:
            if self.task.adversary.clip is not None:
                nn.utils.clip_grad_norm_(self.adversary.parameters(), self.task.adversary.clip)
            self.adversary_optimizer.step()

    def _add_adversary_metrics(self, measures: Mapping[str, Tensor], n_pairs: int) -> None:
        for name, value in measures.items():
            total = self._adversary_metric_sums.setdefault(name, torch.zeros_like(self._loss_totals[0]))
            total += n_pairs * value.double()

    def extra_metrics(self) -> dict[str, float]:
        """Return the adversary's metrics, averaged over the epoch. Warn if the adversary samples with a very low entropy."""
        n_pairs = max(1, self.progress.pairs)
        means = {f"adversary_{name}": float(total) / n_pairs for name, total in self._adversary_metric_sums.items()}
        if means.get("adversary_entropy", 1.0) < _MIN_ENTROPY:
            log.warning(
                "epoch %d: the adversary's entropy is %.2g, so it samples the same negative for a query again and again; "
                "--set adversary.entropy_weight=1 or a lower adversary.learning_rate prevents that",
                self.progress.epoch + 1,
                means["adversary_entropy"],
            )
        return means

    def _splits_by_image(self, loss: Loss) -> bool:
        """Return whether each process computes the loss of its own images only, instead of the loss of the complete batch."""
        context = LossContext(similarity=self.model.config.similarity, is_compiled=self.settings.compile)
        return self.processes.size > 1 and self.hard_negatives is None and loss.splits_by_image(context)

    def _read_chunks(self, image_inputs: BatchVectors, share: Indices) -> list[tuple[BatchVectors, BatchVectors]]:
        """Return the inputs of this process's share of a batch, in chunks of ``train.chunk`` pairs.

        With more processes than pairs, the share can be empty. Then there is one chunk, without images and captions.
        """
        size = self.settings.chunk or max(1, len(share))
        rows = [slice(start, start + size) for start in range(0, max(1, len(share)), size)]
        captions = self.task.caption_inputs
        return [
            (
                tuple(move_tensor(part[some], self.device) for part in image_inputs),
                captions.read(share[some]) if len(share) else (),
            )
            for some in rows
        ]

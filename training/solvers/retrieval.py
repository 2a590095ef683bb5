"""Training by gradients on image-caption pairs, optionally against an adversary."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vse.eval.defaults import DEFAULT_KS
from vse.features.backbones.device import move_tensor
from vse.features.backbones.networks import autocast
from vse.pipeline.errors import UserError
from vse.training.adversaries.base import Opponent
from vse.training.kinds import BatchVectors, InputKind
from vse.training.losses.base import Batch, Objective
from vse.training.losses.nested import build_nested_objective
from vse.training.solvers.base import RetrievalSolver, RetrievalTask
from vse.training.solvers.epochs import GradientSolver, Indices
from vse.training.solvers.optimisation import OPTIMIZERS

log = logging.getLogger(__name__)

_MIN_ENTROPY = 0.05  # of an adversary's samples, mean over an epoch, in nats; a warning is logged below it
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
        model = self.model
        several, encoders = self.processes.size > 1, nn.ModuleList([model.image_encoder, model.caption_encoder])
        if several and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in encoders.modules()):
            raise UserError("batch normalisation in an encoder requires a single process: each has its own statistics")
        if several and task.adversary is not None:
            raise UserError("an adversary requires a single process")
        self.adversary = None if task.adversary is None else task.adversary.build(self.build_opponent(task)).to(self.device)
        self._adversary_metric_sums: dict[
            str, Tensor
        ] = {}  # the adversary's measures, each summed over the pairs of the epoch
        if self.adversary is not None and task.adversary is not None:
            # Adam refuses an empty list; an adversary without weights gets an optimiser with nothing to update.
            weights = [*self.adversary.parameters()] or [nn.Parameter(torch.empty(0, device=self.device))]
            self.adversary_optimizer = OPTIMIZERS["adam"](weights, lr=task.adversary.learning_rate, fused=True)

    @staticmethod
    def build_opponent(task: RetrievalTask) -> Opponent:
        computation = task.settings.batch_size, task.settings.precision, task.processes.device
        return Opponent(task.model, task.loss, task.pairs, task.image_inputs, task.caption_inputs, *computation)

    @property
    def chance_rsum(self) -> float:
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
        shares = [self.processes.own_share(batch) for batch in batches]
        stream = self.task.image_inputs.read_batches(shares, self.pairs.image_indices, self.task.seed, epoch)
        if self.adversary is not None and self.progress.step == 0:
            self.adversary.start_epoch(self.model)
        for batch, images in zip(batches, stream, strict=True):
            yield self.step(batch, images, objective)

    def end_epoch(self) -> None:
        if self.hard_negatives:
            self.hard_negatives.end_epoch()
        self._adversary_metric_sums = {}

    def watched_losses(self) -> list[tuple[float, str, str]]:
        adversary_loss = (
            float(self._adversary_metric_sums.get("loss", 0.0)),
            "the adversary's loss",
            "a lower adversary.learning_rate",
        )
        return [*super().watched_losses(), adversary_loss]

    def step(self, batch: Indices, image_inputs: BatchVectors, objective: Objective) -> tuple[Tensor, Tensor]:
        """Train on one batch. Return the loss of the batch, and the loss that it would have if all embeddings were equal.

        ``batch`` : indices of the pairs of the complete batch.
        ``image_inputs`` : model inputs for the images of this process's share of the batch.
        """
        share = self.processes.own_share(batch)
        torch.manual_seed(self.step_seed(1 + self.processes.rank))
        images, captions = self._embed_share(image_inputs, share)
        images, captions = (self.processes.gather_embeddings(side, len(batch)) for side in (images, captions))
        texts = self.pairs.text_indices[batch] if self.task.loss.lambda3 else batch
        pairs = Batch(images, captions, self.pairs.image_indices[batch], texts, pair_indices=batch)
        self.start_step()
        with autocast(self.settings.precision, self.device) if self.model.scores_every_pair else nullcontext():
            if self.adversary is None:
                cost = objective(pairs, self.step_seed(0))
            else:
                cost, adversary_loss, measures = self.adversary.compute_losses(pairs, self.model, objective, self.step_seed(0))
        if self.adversary is None:
            self.scale_cost(cost.value, self.task.select_loss(self.progress.epoch)).backward()  # type: ignore[no-untyped-call]
        else:
            self._set_both_gradients(cost.value, adversary_loss, list(self.adversary.parameters()))
            self._add_adversary_metrics({**measures, "loss": adversary_loss.detach()}, len(batch))
        if self.ends_update():
            self.processes.sum_gradients(self.model.parameters(), complete=self.model.similarity.parameters())
            self.take_step()
        if self.adversary is not None:
            self._step_adversary()
        if self.hard_negatives and cost.query_scores is not None:
            self.hard_negatives.add_batch(self.progress.epoch + 1, batch.tolist(), cost.query_scores, self.task.loss.margin)
        return cost.value.detach().double(), cost.collapsed_value.double()

    def _set_both_gradients(self, loss: Tensor, adversary_loss: Tensor, adversary_weights: list[nn.Parameter]) -> None:
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
        """Return the adversary's metrics, averaged over the epoch. Warn if the adversary always samples the same negatives."""
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

    def _embed_share(self, image_inputs: BatchVectors, share: Indices) -> tuple[BatchVectors, BatchVectors]:
        """Return the embeddings of this process's share of a batch, which is empty with more processes than pairs."""
        if not len(share):
            images, captions = (
                _build_empty_embeddings(kind, self.model.dim, self.device) for kind in self.model.embedding_kinds
            )
            return images, captions
        with autocast(self.settings.precision, self.device):
            images = self.model.embed_images(*(move_tensor(part, self.device) for part in image_inputs))
            return images, self.model.embed_captions(*self.task.caption_inputs.read(share))


def _build_empty_embeddings(kind: InputKind, dim: int, device: torch.device) -> BatchVectors:
    if kind == InputKind.VECTORS:
        return (torch.zeros(0, dim, device=device, requires_grad=True),)
    return torch.zeros(0, 1, dim, device=device, requires_grad=True), torch.zeros(0, 1, dtype=torch.bool, device=device)

"""Training on a feature cache: VSE0, VSE++ and whatever else an experiment's settings say."""

from __future__ import annotations

import logging
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import vse
from vse.eval.metrics import RECALLS, metrics
from vse.eval.ranks import ranks_from_embeddings
from vse.features.cache import FeatureCache, open_cache
from vse.features.hardware import pick_device
from vse.features.reader import FeatureReader
from vse.pipeline.captions import Vocabulary
from vse.pipeline.config import ExperimentConfig
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files import sha256_file, write_json
from vse.pipeline.presets import changed_fields
from vse.train.batches import Batch, Pairs, shuffled
from vse.train.encode import encode
from vse.train.losses import Loss, loss_by_name, negative_pairs
from vse.train.model import TwoBranchModel
from vse.train.run import RunFolder, relative_path

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """What changes from epoch to epoch, beside the weights and the optimiser."""

    epoch: int
    rows: list[dict[str, float]]

    @property
    def best(self) -> dict[str, float]:
        """The epoch with the highest validation rsum, the first of equals."""
        return max(self.rows, key=lambda row: row["rsum"])


class Trainer:
    """One training run: batches, steps, validation, checkpoints.

    Parameters
    ----------
    experiment : every setting
    train, val : the pairs of both splits
    model : what is trained
    seed : of the order of the pairs
    device : where the model lies
    """

    def __init__(
        self, experiment: ExperimentConfig, train: Pairs, val: Pairs, model: TwoBranchModel, seed: int, device: torch.device
    ) -> None:
        self.settings = experiment.train
        self.loss_settings, self.warmup = experiment.loss, experiment.warmup
        self.train, self.val = train, val
        self.model = model
        self.seed = seed
        self.device = device
        self._collapsed = False
        self.optimizer = torch.optim.Adam(model.parameters(), lr=self.settings.learning_rate)

    def state(self, progress: Progress) -> dict[str, Any]:
        """All that a bit-exact resume needs: the order of an epoch's pairs depends on its number and the seed alone."""
        return {
            "epoch": progress.epoch,
            "rows": progress.rows,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> Progress:
        """Continue from what :meth:`state` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        return Progress(state["epoch"], state["rows"])

    def run_epoch(self, epoch: int) -> dict[str, float]:
        """Train one epoch and validate: the row of ``metrics.csv``."""
        learning_rate = self.settings.learning_rate * self.settings.decay ** (epoch // self.settings.decay_after)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        criterion = loss_by_name(self.warmup.loss if epoch < self.warmup.epochs else self.loss_settings.name)
        started = time.perf_counter()
        total, collapsed, seen = 0.0, 0.0, 0
        n_batches = -(-len(self.train) // self.settings.batch_size)
        self.model.train()
        with tqdm(total=n_batches, desc=f"epoch {epoch + 1}/{self.settings.epochs}", unit="batch", disable=None) as bar:
            for pairs in shuffled(len(self.train), self.settings.batch_size, self.seed, epoch):
                loss, collapse = self.step(self.train.batch(pairs), criterion)
                if not np.isfinite(loss):
                    raise UserError(
                        f"epoch {epoch + 1}: the loss is {loss}; the last good checkpoint is kept. Try a lower learning rate"
                    )
                total, collapsed, seen = total + loss, collapsed + collapse, seen + len(pairs)
                bar.set_postfix(loss=f"{total / seen:.3f}", pairs_per_s=f"{seen / (time.perf_counter() - started):.0f}")
                bar.update()
        seconds = time.perf_counter() - started
        self._warn_of_collapse(epoch + 1, total / seen, collapsed > 0 and abs(total - collapsed) < 0.02 * collapsed)
        row = {"epoch": epoch + 1, "learning_rate": learning_rate, "loss": total / seen}
        return {**row, **self.validate(), "seconds": round(seconds, 2), "pairs_per_s": round(seen / seconds, 1)}

    def _warn_of_collapse(self, epoch: int, loss: float, collapsed: bool) -> None:
        """Say once that the loss sits where it is when all embeddings are alike, and once that it left."""
        if collapsed and not self._collapsed:
            log.warning(
                "epoch %d: the loss sits at its collapse value, %.3f per pair: all embeddings are alike "
                "(2 x batch x margin for the max of hinges). It often stays there for a few epochs; if it does not leave, "
                "lower the learning rate, or warm up with the sum of hinges (--set warmup.epochs=1)",
                *(epoch, loss),
            )
        elif self._collapsed and not collapsed:
            log.info("epoch %d: the loss left its collapse value", epoch)
        self._collapsed = collapsed

    def step(self, batch: Batch, criterion: Loss) -> tuple[float, float]:
        """One update; the loss of the batch and what it would be if all embeddings were alike."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
            scores = self.model(batch.features.to(self.device), batch.words.to(self.device), batch.lengths).float()
        negatives = negative_pairs(batch.image_ids.to(self.device), self.loss_settings.same_image == "mask")
        loss = criterion(scores, negatives, self.loss_settings.margin)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        collapse = criterion(torch.zeros_like(scores), negatives, self.loss_settings.margin)
        return loss.item(), collapse.item()

    def validate(self) -> dict[str, float]:
        """Recalls on the whole validation split, both ways, and their sum."""
        images, captions = encode(self.model, self.val, self.device)
        rows = {int(imgid): row for row, imgid in enumerate(self.val.image_ids)}
        owners = torch.tensor([rows[int(imgid)] for imgid in self.val.caption_image_ids])
        found = metrics(ranks_from_embeddings(images, captions, owners))
        recalls = {f"{way}_r{k}": found[way][f"r{k}"] for way in ("i2t", "t2i") for k in RECALLS}
        return {**recalls, "rsum": found["rsum"]}


def train(
    features: Path,
    experiment: ExperimentConfig,
    seed: int = 0,
    out: Path | None = None,
    captions: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
) -> Path:
    """Train an experiment on a feature cache; returns the run folder.

    Parameters
    ----------
    features : the cache; it names the data set and where its captions lie
    experiment : every setting
    seed : of the initial weights and of the order of the pairs
    out : the run folder, ``runs/<dataset>_<experiment>/seed-<seed>`` if None
    captions : another place of ``dataset.json``
    resume : continue an unfinished run of the same settings from its last epoch; start if there is none
    overwrite : replace a run of other settings, or an unfinished one that is not resumed
    device : ``auto`` takes a GPU if there is one
    """
    for name in (experiment.loss.name, experiment.warmup.loss):
        loss_by_name(name)
    cache = open_cache(features)
    dataset = load_dataset_file(captions or cache.captions)
    folder = RunFolder(out or Path("runs", f"{dataset.name}_{experiment.name}", f"seed-{seed}"))
    if cache.feature != experiment.feature:
        log.info(
            "experiment %r asks for the feature %r; this run reads %r", experiment.name, experiment.feature, cache.feature
        )
        experiment = experiment.model_copy(update={"feature": cache.feature})
    identity = {
        "dataset": dataset.name,
        "captions_sha256": sha256_file(dataset.path),
        "seed": seed,
        "feature": cache.feature,
        "feature_key": cache.key,
    }
    action = _what_to_do(folder, experiment, identity, resume, overwrite)
    if action == "nothing":
        log.info("%s: this run is finished (--overwrite trains it again)", folder.path)
        return folder.path
    trainer, vocabulary = _prepare(experiment, cache, dataset, seed, device)
    record = {
        **identity,
        "experiment": experiment.name,
        "state": "running",
        "features": {"name": cache.feature, "key": cache.key, "path": relative_path(features, folder.path)},
        "captions": relative_path(dataset.path, folder.path),
        "n_words": len(vocabulary),
        "n_train_pairs": len(trainer.train),
        "versions": {"vse": vse.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "device": str(trainer.device),
    }
    if action == "resume":
        progress = trainer.restore(folder.checkpoint())
        write_json(folder.record_file, record)
        log.info("%s: continues after epoch %d", folder.path, progress.epoch)
    else:
        progress = Progress(0, [])
        folder.start(experiment, vocabulary, record)
    _run(folder, trainer, progress, experiment.train.epochs, identity)
    _finish(folder, record, progress)
    return folder.path


def _run(folder: RunFolder, trainer: Trainer, progress: Progress, epochs: int, identity: Mapping[str, Any]) -> None:
    """Train the epochs that are left. The best weights are written before the checkpoint that counts their epoch."""
    for epoch in range(progress.epoch, epochs):
        progress.rows.append(trainer.run_epoch(epoch))
        progress.epoch = epoch + 1
        row = progress.rows[-1]
        if progress.best is row:
            folder.save_best(trainer.model.state_dict())
        folder.save_metrics(progress.rows)
        folder.save_checkpoint({**trainer.state(progress), "identity": dict(identity)})
        log.info(
            "epoch %d: loss %.3f, val rsum %.1f (i2t R@1 %.1f, t2i R@1 %.1f), %.0f pairs/s%s",
            *(row["epoch"], row["loss"], row["rsum"], row["i2t_r1"], row["t2i_r1"], row["pairs_per_s"]),
            ", best so far" if progress.best is row else "",
        )


def _finish(folder: RunFolder, record: dict[str, Any], progress: Progress) -> None:
    timing = {
        "epochs": progress.epoch,
        "best_epoch": progress.best["epoch"],
        "best_rsum": progress.best["rsum"],
        "train_seconds": round(sum(row["seconds"] for row in progress.rows), 1),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    write_json(folder.record_file, {**record, "state": "finished", **timing})


def _what_to_do(
    folder: RunFolder, experiment: ExperimentConfig, identity: Mapping[str, Any], resume: bool, overwrite: bool
) -> str:
    """``start``, ``resume`` or ``nothing``; :class:`UserError` if that would destroy or mix up a run."""
    if not folder.config_file.is_file() or (overwrite and not resume):
        return "start"
    record = folder.record() if folder.record_file.is_file() else {}
    known = record or (folder.checkpoint().get("identity", {}) if folder.checkpoint_file.is_file() else identity)
    before = {**folder.experiment().model_dump(mode="json"), **{key: known.get(key) for key in identity}}
    changes = changed_fields(before, {**experiment.model_dump(mode="json"), **identity})
    if changes and not overwrite:
        raise UserError(
            f"{folder.path} holds a run of other settings ({'; '.join(changes[:4])}); give another --out, or --overwrite it"
        )
    if changes:
        return "start"
    if resume and folder.checkpoint_file.is_file():
        return "resume" if record.get("state") != "finished" else "nothing"
    if not folder.checkpoint_file.is_file():
        return "start"
    if record.get("state") == "finished":
        return "nothing"
    raise UserError(f"{folder.path} holds an unfinished run; continue it with --resume, or --overwrite it")


def _prepare(
    experiment: ExperimentConfig, cache: FeatureCache, dataset: Dataset, seed: int, device: str
) -> tuple[Trainer, Vocabulary]:
    if cache.dataset != dataset.name:
        raise UserError(f"{cache.path} holds features of {cache.dataset!r}, but {dataset.path} is {dataset.name!r}")
    if cache.kind != "image" or cache.offsets is not None or len(cache.row_shape) != 1:
        raise UserError(f"{cache.path} holds {cache.described()}; one vector per image is needed")
    reader = FeatureReader(cache, experiment.train.memory_gb)
    images = dataset.split("train")
    tokens = (caption.tokens for image in images for caption in image.captions)
    vocabulary = Vocabulary.build(tokens, experiment.train.min_count)
    train_pairs, val_pairs = (Pairs(split, reader, vocabulary) for split in (images, dataset.split("val")))
    if len(train_pairs) < 2:
        raise UserError(f"{dataset.path}: one training caption has no negatives; at least two are needed")
    torch.manual_seed(seed)
    where = pick_device(device)
    model = TwoBranchModel(experiment.model, cache.dim, len(vocabulary)).to(where)
    return Trainer(experiment, train_pairs, val_pairs, model, seed, where), vocabulary

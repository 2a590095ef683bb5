"""A training step reads no value back from a GPU: the program would wait for it, and the GPU for the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import Patch, experiment
from tests.training.readbacks import GPU, on_cpu, on_gpu, recorded
from vse.training.kinds import InputKind, PackedEmbeddings
from vse.training.solvers.encode import PairScores, encode_captions, encode_images
from vse.training.solvers.retrieval import RetrievalTrainer
from vse.training.training import train
from vse.training.use.model import load_run

SETS = "model.caption_encoder={name: gru, states: all}"
CASES = {
    "max of hinges": [],
    "sum of hinges": ["loss.name=sum"],
    "top": ["loss.name=top", "loss.lambda3=0.1", "loss.lambda4=0.1", "train.sampling=neighbourhood"],
    "spectrum": ["loss.name=spectrum"],
    "infonce": ["loss={name: infonce, learned: true, same_image: positive}"],
    "infonce by blocks": ["loss={name: infonce, learned: true, same_image: mask, block: 8}"],
    "sigmoid": ["loss=sigmoid"],
    "sigmoid by blocks": ["loss={name: sigmoid, block: 8}"],
    "gce": ["loss=gce"],
    "nested": ["loss={name: max, nested: [4, 8]}"],
    "network": ["model.similarity=network", "model.similarity.widths=[6]", "loss.name=logistic"],
    "order": ["model.similarity=order"],
    "euclidean": ["model.similarity=euclidean"],
    "todnet": ["model.similarity=todnet"],
    "ace": ["adversary=ace"],
    "chunks": ["train.chunk=8"],
    "branches": [
        "model.image_encoder={name: branch, widths: [12, 9]}",
        "model.caption_encoder={name: lstm, head: {widths: [12, 9]}}",
    ],
    "scan t2i": ["model.similarity=scan", SETS],
    "scan i2t": ["model.similarity={name: scan, attention: i2t}", SETS],
    "maxsim": ["model.similarity=maxsim", SETS],
    "compositional": ["model.similarity=scan", SETS, "adversary=compositional"],
    "generalised pooling, words masked": [
        "model.image_encoder=gpo",
        "model.caption_encoder={name: gru, states: pooled, size_augmentation: 0.2}",
    ],
}


# The places that must wait, by case, with the reason.
AUGMENTED = {  # removed words make captions shorter
    "training/models/encoders/recurrent.py: forward: cpu",
    "training/models/encoders/pooling.py: forward: __int__",
}
ALLOWED = {
    "ace": {
        "training/adversaries/ace.py: compute_losses: __int__",  # once an epoch
        "training/adversaries/ace.py: scores: cpu",  # the sampled captions are read on the processor
    },
    "compositional": {  # composes negatives for the words of all queries, without their padding
        "training/adversaries/compositional.py: _compute_direction_losses: __getitem__",
        "training/adversaries/compositional.py: _compute_direction_losses: nonzero",
        "training/adversaries/compositional.py: scores: __setitem__",
    },
    "generalised pooling, words masked": AUGMENTED
    | {  # its batch normalisation leaves out padding
        "training/models/encoders/pooling.py: forward: __getitem__",
        "training/models/encoders/pooling.py: forward: __setitem__",
    },
}


def on_device(trainer: RetrievalTrainer, chunk: Any) -> Any:
    """The inputs of a chunk on the stand-in for a GPU. The lengths of captions stay where they are."""
    images, captions = chunk
    n_moved = 1 if trainer.task.caption_inputs.kind == InputKind.WORDS else 2
    return on_gpu(images), (*on_gpu(captions[:n_moved]), *captions[n_moved:])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_nothing_back(name: str, cache: Path, regions: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    found: set[str] = set()
    step, read = RetrievalTrainer.step, RetrievalTrainer._read_chunks

    def watched(self: RetrievalTrainer, batch: Any, images: Any, *more: Any) -> Any:
        models = [self.model, *([self.adversary] if self.adversary else [])]
        with monkeypatch.context() as patch, recorded(*models) as places:
            patch.setattr(self, "device", GPU)
            patch.setattr(self, "_read_chunks", lambda *inputs: [on_device(self, chunk) for chunk in read(self, *inputs)])
            result = step(self, batch, on_gpu(images), *more)
        found.update(places)
        return on_cpu(result)

    monkeypatch.setattr(RetrievalTrainer, "step", watched)
    reads_sets = any(word in setting for setting in CASES[name] for word in ("scan", "maxsim", "gpo"))
    train(regions if reads_sets else cache, experiment("train.epochs=1", *CASES[name]), out=tmp_path / "run")
    assert found == ALLOWED.get(name, set())


@pytest.mark.parametrize("similarity", ["cosine", "scan", "maxsim", "todnet"])
def test_an_evaluation_reads_back_each_block_of_embeddings_and_of_scores(
    similarity: str, cache: Path, regions: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    sets = [f"model.similarity={similarity}", "train.epochs=1", *([SETS] if similarity in ("scan", "maxsim") else [])]
    run = load_run(train(regions if SETS in sets else cache, experiment(*sets), out=tmp_path / "run"), "val")
    with recorded(run.model) as places:
        images = encode_images(run.model, run.split, GPU)
    assert places == {"training/solvers/encode.py: <genexpr>: cpu"}
    images = PackedEmbeddings(*map(on_cpu, (images.vectors, images.lengths)))
    if similarity == "cosine":
        return
    scores = PairScores(run.model, images, encode_captions(run.model, run.split))
    monkeypatch.setattr(scores, "_device", GPU)
    with recorded(run.model) as places:
        scores(slice(0, 4), None)
    assert places == {"training/solvers/encode.py: _score: cpu"}

"""Runs whose model attends, and what is drawn of a pair against the attention of that pair by itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.drawn import Shown, shares
from vse.training.kinds import PackedEmbeddings
from vse.training.solvers.encode import encode_split
from vse.training.use.model import TrainedRun, load_run


def scan(side: str) -> list[str]:
    similarity = f"model.similarity={{name: scan, attention: {side}}}"
    return [similarity, "model.caption_encoder={name: gru, states: all, bidirectional: true}", "train.epochs=1"]


@cache
def _loaded(run: Path) -> tuple[TrainedRun, PackedEmbeddings]:
    trained = load_run(run, "test", device="cpu")
    return trained, encode_split(trained.model, trained.split, trained.device)[0]


def slow_weights(run: Path, image_id: int, tokens: list[str]) -> tuple[np.ndarray, str]:
    """The attention (n_regions, n_words) of one pair, its caption encoded by itself, and which side attends."""
    trained, images = _loaded(run)
    words, first = trained.vocabulary.encode(tokens), torch.tensor([0])
    image = images.unpack(torch.tensor([trained.split.pairs.image_ids.tolist().index(image_id)]))
    with torch.inference_mode():
        caption = trained.model.embed_captions(torch.tensor([words]), torch.tensor([len(words)]))
        weights = trained.model.similarity.compute_attention(image, caption, first, first)[0]
    side = trained.experiment.model.similarity.attention_direction
    return (weights if side == "t2i" else weights.T).numpy(), side


def compare(shown: Shown, run: Path, image_id: int, tokens: list[str], atol: float = 2e-3) -> None:
    weights, side = slow_weights(run, image_id, tokens)
    drawn = shares(weights, side)
    np.testing.assert_allclose(shown.opacities / shown.opacities.max(), np.where(drawn < 0.02, 0, drawn), atol=atol)
    for column, (label, token) in enumerate(zip(shown.words.values(), ["<start>", *tokens, "<end>"], strict=True)):
        word, highest = label.split(" ")
        assert word in (token, f"<{token}>")
        assert int(highest.removesuffix("%")) == pytest.approx(100 * weights[:, column].max(), abs=0.51 + 100 * atol)

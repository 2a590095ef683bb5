"""Try a user's own encoder on five images or captions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vse.pipeline.errors import UserError
from vse.pipeline.presets.own_code import explain_own_errors
from vse.training.kinds import BatchVectors, InputKind
from vse.training.models.encoders.base import Encoder, EncoderSettings, EncoderSpec

ENCODER_FORM = (
    "`build(self, spec)` returns an Encoder with the attribute `dim`, whose `forward` takes the tensors of a batch and "
    "returns a tuple, `(vectors,)` of shape (n, dim), or for sets `(vectors, mask)`, such as `return (self.layer(vectors),)`"
)
_N_ROWS, _LONGEST, _INPUT_DIM, _DIM, _WORD_DIM = 5, 3, 6, 8, 4


def check_encoder(settings: EncoderSettings) -> None:
    """Encode five inputs of each kind that the encoder reads, except the tokens of a transformer.

    Raises UserError if the result is not a tuple of finite embeddings (5, dim), with a mask for sets, or if no weight gets a
    gradient.
    """
    for kind in settings.input_kinds:
        if kind in _BATCHES:
            _check_kind(settings, kind, _BATCHES[kind]())


def _check_kind(settings: EncoderSettings, kind: InputKind, batch: BatchVectors) -> None:
    with explain_own_errors(settings.name, ENCODER_FORM):
        torch.manual_seed(0)
        encoder = settings.build(EncoderSpec(kind, _INPUT_DIM, _DIM, _WORD_DIM))
    if not isinstance(encoder, Encoder) or not isinstance(getattr(encoder, "dim", None), int):
        raise _refuse(settings, kind, f"build returns {type(encoder).__name__}, not an Encoder with a whole number `dim`")
    with explain_own_errors(settings.name, ENCODER_FORM):
        encoded = encoder(*batch)
    if not isinstance(encoded, tuple) or not all(isinstance(part, Tensor) for part in encoded):
        raise _refuse(settings, kind, f"it returns {type(encoded).__name__}, not a tuple of tensors")
    is_set = settings.embedding_kind(kind) == InputKind.SETS
    if len(encoded) != 1 + is_set:
        raise _refuse(settings, kind, f"it returns {len(encoded)} tensors for {settings.embedding_kind(kind)}")
    vectors = encoded[0]
    if vectors.ndim != 2 + is_set or len(vectors) != _N_ROWS or vectors.shape[-1] != encoder.dim:
        found = f"embeddings of shape {tuple(vectors.shape)} for {_N_ROWS} inputs, and its dim is {encoder.dim}"
        raise _refuse(settings, kind, f"it returns {found}")
    if is_set and encoded[1].shape != vectors.shape[:2]:
        raise _refuse(settings, kind, f"its mask {tuple(encoded[1].shape)} does not fit the vectors {tuple(vectors.shape)}")
    if not vectors.isfinite().all():
        raise _refuse(settings, kind, "an embedding is not finite")
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    if weights:
        _check_gradient(settings, kind, vectors, weights)


def _check_gradient(settings: EncoderSettings, kind: InputKind, vectors: Tensor, weights: list[nn.Parameter]) -> None:
    if not vectors.requires_grad:
        raise _refuse(settings, kind, "its weights get no gradient; detach and numpy cut it off")
    with explain_own_errors(settings.name, ENCODER_FORM):
        gradients = torch.autograd.grad(vectors.square().sum(), weights, allow_unused=True)
    if not all(gradient is None or gradient.isfinite().all() for gradient in gradients):
        raise _refuse(settings, kind, "the gradient of a weight is not finite")


def _draw_vectors() -> BatchVectors:
    return (torch.randn(_N_ROWS, _INPUT_DIM, generator=torch.Generator().manual_seed(0)),)


def _draw_sets() -> BatchVectors:
    mask = torch.arange(_LONGEST) < torch.tensor([3, 2, 1, 3, 2])[:, None]
    vectors = torch.randn(_N_ROWS, _LONGEST, _INPUT_DIM, generator=torch.Generator().manual_seed(0))
    return vectors * mask[:, :, None], mask


def _draw_words() -> BatchVectors:
    words = torch.randint(0, _INPUT_DIM, (_N_ROWS, _LONGEST), generator=torch.Generator().manual_seed(0))
    return words, torch.tensor([3, 2, 1, 3, 2])


_BATCHES: dict[InputKind, Callable[[], BatchVectors]] = {
    InputKind.VECTORS: _draw_vectors,
    InputKind.SETS: _draw_sets,
    InputKind.WORDS: _draw_words,
}


def _refuse(settings: EncoderSettings, kind: InputKind, fault: str) -> UserError:
    return UserError(f"{settings.name}, tried on {_N_ROWS} {kind}: {fault}; {ENCODER_FORM}")

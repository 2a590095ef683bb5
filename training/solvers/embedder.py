"""The embedding of a training batch, at once or in chunks, and the gradients of its embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vse.features.backbones.networks import autocast
from vse.training.kinds import BatchVectors, InputKind, pad_sets
from vse.training.models.build import Model
from vse.training.processes.group import postpone_sum


class BothEncoders(nn.Module):
    """Both encoders of a model, as one module for the exchange of gradients."""

    def __init__(self, model: Model, precision: str, device: torch.device) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for name, part in model.named_children() if name != "similarity")
        self._embed_functions = model.embed_images, model.embed_captions
        self._kinds, self._dim = model.embedding_kinds, model.dim
        self._precision, self._device = precision, device

    @property
    def has_batch_norms(self) -> bool:
        """True if a batch normalisation uses the statistics of the batch."""
        return any(isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in self.modules())

    def forward(self, images: BatchVectors, captions: BatchVectors) -> tuple[BatchVectors, BatchVectors]:
        """Return the embeddings of images and captions.

        If there are no images, return empty tensors that depend on every parameter, so that each parameter has a gradient.
        """
        if not len(images[0]):
            nothing = sum(weight.flatten()[:0].sum() for weight in self.parameters() if weight.requires_grad)
            empty_images, empty_captions = (self._build_empty_embeddings(kind, nothing) for kind in self._kinds)
            return empty_images, empty_captions
        embed_images, embed_captions = self._embed_functions
        with autocast(self._precision, self._device):
            return embed_images(*images), embed_captions(*captions)

    def _build_empty_embeddings(self, kind: InputKind, nothing: Tensor | int) -> BatchVectors:
        if kind == InputKind.VECTORS:
            return (torch.zeros(0, self._dim, device=self._device) + nothing,)
        vectors = torch.zeros(0, 1, self._dim, device=self._device) + nothing
        return vectors, torch.zeros(0, 1, dtype=torch.bool, device=self._device)


class BatchEmbedder:
    """Embeds a batch, and back-propagates the gradients of its embeddings to the encoders.

    If there are several chunks, only their embeddings are kept, and each chunk is embedded again for its gradients (gradient
    cache: Gao et al., 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").

    ``encoders`` : the encoders.
    ``summing_encoders`` : the same, as :meth:`ProcessGroup.wrap_encoders` returns them.
    ``seed`` : seed of random numbers in the encoders, such as dropout.
    """

    def __init__(self, encoders: nn.Module, summing_encoders: nn.Module, seed: int) -> None:
        self._encoders, self._summing_encoders, self._seed = encoders, summing_encoders, seed

    def embed(self, chunks: list[tuple[BatchVectors, BatchVectors]], ends_update: bool) -> tuple[BatchVectors, BatchVectors]:
        """Return the embeddings of the images and of the captions of all chunks.

        ``ends_update`` : whether this batch is the last one of its update. Then :meth:`backward` sums the gradients over the
            processes.
        """
        self._chunks, self._ends_update = chunks, ends_update
        if len(chunks) == 1:
            with postpone_sum(self._summing_encoders, not ends_update):
                self._joined = self._embed_chunk(self._summing_encoders, 0)
            return self._joined
        with torch.no_grad():
            parts = [self._embed_chunk(self._encoders, k) for k in range(len(chunks))]
        images, captions = (_join_chunks(list(side)) for side in zip(*parts, strict=True))
        for side in (images, captions):
            side[0].requires_grad_()
        self._joined = images, captions
        return self._joined

    def backward(self, cost: Tensor) -> None:
        with postpone_sum(self._summing_encoders, not self._ends_update):
            cost.backward()  # type: ignore[no-untyped-call]
        if len(self._chunks) == 1:
            return
        start = 0
        for k, (images, _) in enumerate(self._chunks):
            rows = slice(start, start + len(images[0]))
            with postpone_sum(self._summing_encoders, not self._ends_update or k < len(self._chunks) - 1):
                sides = self._embed_chunk(self._summing_encoders, k)
                pairs = [(side[0], joined[0].grad) for side, joined in zip(sides, self._joined, strict=True)]
                learned = [(new, gradient) for new, gradient in pairs if new.requires_grad and gradient is not None]
                gradients = [gradient[rows][:, : new.shape[1]] for new, gradient in learned]
                torch.autograd.backward([new for new, _ in learned], gradients)
            start = rows.stop

    def _embed_chunk(self, encoders: nn.Module, k: int) -> tuple[BatchVectors, BatchVectors]:
        torch.manual_seed(self._seed + k)
        images, captions = encoders(*self._chunks[k])
        return images, captions


def _join_chunks(parts: list[BatchVectors]) -> BatchVectors:
    longest = max(part[0].shape[1] for part in parts)
    return tuple(torch.cat(list(tensors)) for tensors in zip(*(pad_sets(part, longest) for part in parts), strict=True))

"""A CNN that is part of the model, for fine-tuning."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vse.features.extractors.cnn import CnnExtractor, normalize_pixels


class TrainableCnn(nn.Module):
    """The network of an extractor, trained further with the model.

    The features of an image are the mean of the features of its crops: a vector or, for a feature map, a vector at each
    position. The vectors have unit length if the extractor normalises features. Parameters after the layer whose output is the
    feature are dropped from the network. Dropout is off.

    ``extractor`` : the CNN, and the preparation of images for the CNN.
    ``batch_norm`` : statistics of batch norms during training: kept (``frozen``), or of the current batch (``train``).
    ``checkpointing`` : whether to compute activations again in the backward pass instead of storing them.
    ``compiled`` : whether to compile the network.
    """

    def __init__(
        self,
        extractor: CnnExtractor,
        batch_norm: Literal["frozen", "train"] = "frozen",
        checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.network = extractor.network
        self.config = extractor.config
        self.batch_norm, self.checkpointing = batch_norm, checkpointing
        self.network.requires_grad_(True)
        self._drop_unused_modules(extractor.device)
        # Methods, because a module kept under a second name would be saved twice.
        self._run_network = torch.compile(self.network.forward) if compiled else self.network.__call__
        self.train(False)

    def forward(self, pixels: UInt8[Tensor, "n n_crops 3 side side"]) -> Float[Tensor, "n *positions dim"]:
        images = normalize_pixels(pixels.flatten(0, 1), self.config.mean, self.config.std, pixels.device)
        keep = not self.checkpointing or not torch.is_grad_enabled()
        output = self._run_network(images) if keep else checkpoint(self._run_network, images, use_reentrant=False)
        vectors = output.float().unflatten(0, pixels.shape[:2]).mean(1)
        return nn.functional.normalize(vectors, dim=-1) if self.config.normalize else vectors

    def train(self, mode: bool = True) -> TrainableCnn:
        """Set the mode of batch norms if ``batch_norm`` is ``train``. All other modules stay in evaluation mode."""
        super().train(False)
        self.training = mode
        if mode and self.batch_norm == "train":
            for module in self.network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.train()
        return self

    def _drop_unused_modules(self, device: torch.device) -> None:
        blank = torch.zeros(1, 3, self.config.crop, self.config.crop, dtype=torch.uint8)
        output = self.network(normalize_pixels(blank, self.config.mean, self.config.std, device))
        names, parameters = zip(*self.network.named_parameters(), strict=True)
        gradients = torch.autograd.grad(output.float().sum(), parameters, allow_unused=True)
        unused = {name for name, gradient in zip(names, gradients, strict=True) if gradient is None}
        for prefix, module in self.network.named_modules():
            own = [name for name, _ in module.named_parameters(recurse=False)]
            if own and all(f"{prefix}.{name}" in unused for name in own):
                for name in [*own, *(name for name, _ in module.named_buffers(recurse=False))]:
                    setattr(module, name, None)
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.track_running_stats = False  # loading weights would add the count of its batches

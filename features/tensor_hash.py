"""The hash by which weights and fitted encoders are known."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors, on any device: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()

"""Which device and how many cores torch may use, and which versions of what are installed."""

from __future__ import annotations

import os

import PIL
import torch

import vse
from vse.pipeline.errors import UserError


def pick_device(name: str) -> torch.device:
    """``auto`` is a GPU if there is one; :class:`UserError` for a device that torch does not have here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: not usable here ({str(error).splitlines()[0]})") from None
    return device


def use_threads(threads: int | None) -> None:
    """Let torch use ``threads`` cores, but no more than there are."""
    if threads is not None:
        torch.set_num_threads(max(1, min(threads, len(os.sched_getaffinity(0)))))


def versions() -> dict[str, str]:
    """Versions of this package and of the libraries that every feature depends on."""
    import torchvision

    return {
        "vse": vse.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "pillow": PIL.__version__,
    }

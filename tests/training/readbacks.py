"""A stand-in for a GPU that records the places of the program that read values of tensors: the program would wait there.

Tensors on it are in the memory of the processor, and say that they are on ``cuda``. What is computed from them is on it, too.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

READS = {"item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
READS |= {
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "bincount",
    "equal",
    "is_nonzero",
    "allclose",
}
GPU, CPU = torch.device("cuda"), torch.device("cpu")


class OnGpu(torch.Tensor):
    """A tensor on the stand-in."""


class StandIn(TorchFunctionMode):
    """Lets what is moved to a device, or made on the stand-in, be there. ``places`` are those that have read a value."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        name, first = function.__name__, arguments[0] if arguments else None
        if name == "__get__" and function.__self__ is torch.Tensor.device and isinstance(first, OnGpu):
            return GPU
        if name == "pin_memory":
            return first
        devices = [value for value in (*arguments, *options.values()) if isinstance(value, torch.device)]
        if reads_values(name, arguments, options):
            self._record(name)
        if name in ("cpu", "numpy", "tolist", "item") or CPU in devices:
            arguments = tuple(value.as_subclass(torch.Tensor) if isinstance(value, OnGpu) else value for value in arguments)
        result = function(*map(real, arguments), **{key: real(value) for key, value in options.items()})
        if name == "_pack_padded_sequence":
            return result[0], on_cpu(result[1])  # torch computes the sizes of the steps from the lengths, on the processor
        return on_gpu(result) if GPU in devices else result

    def _record(self, name: str) -> None:
        stack = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        frames = [frame for frame in stack if "/vse/" in frame.filename]
        if frames and (name not in ("to", "__int__") or frames[-1] == stack[-1]):  # torch's own checks read none on a GPU
            where = Path(frames[-1].filename).as_posix().rpartition("/vse/")[2]
            self.places.add(f"{where}: {frames[-1].name}: {name}")


def reads_values(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether a function of torch reads values of a tensor on the stand-in."""
    first = arguments[0] if arguments else None
    if name in READS or (name == "to" and CPU in (*arguments[1:], *options.values())):
        return isinstance(first, OnGpu)
    if name in ("__getitem__", "__setitem__"):
        index = arguments[1] if isinstance(arguments[1], tuple) else (arguments[1],)
        has_mask = any(isinstance(part, OnGpu) and part.dtype == torch.bool for part in index)
        return has_mask and (name == "__getitem__" or getattr(arguments[2], "ndim", 0) > 0)
    if name == "repeat_interleave":
        return isinstance(arguments[1], OnGpu) and "output_size" not in options
    return name == "where" and len(arguments) == 1


def real(value: Any) -> Any:
    """The device that a device is in truth; any other value unchanged."""
    return CPU if isinstance(value, torch.device) or (isinstance(value, str) and value == "cuda") else value


def on_gpu(tensors: Any) -> Any:
    """Put tensors on the stand-in, also those in a tuple or a list."""
    if isinstance(tensors, torch.Tensor):
        return tensors.as_subclass(OnGpu)
    return type(tensors)(map(on_gpu, tensors)) if type(tensors) in (tuple, list) else tensors


def on_cpu(tensors: Any) -> Any:
    """Take tensors from the stand-in, also those in a tuple or a list."""
    if isinstance(tensors, torch.Tensor):
        return tensors.as_subclass(torch.Tensor)
    return type(tensors)(map(on_cpu, tensors)) if type(tensors) in (tuple, list) else tensors


@contextmanager
def recorded(*modules: torch.nn.Module) -> Iterator[set[str]]:
    """Record the places that read a value in this block. The buffers of the modules are on the stand-in."""
    owners = [(part, name) for module in modules for part in module.modules() for name in part._buffers]
    for part, name in owners:
        part._buffers[name] = on_gpu(part._buffers[name])
    with StandIn() as stand_in:
        try:
            yield stand_in.places
        finally:
            for part, name in owners:
                part._buffers[name] = on_cpu(part._buffers[name])

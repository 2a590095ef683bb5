"""The GPU that FAISS computes on: the one that the user's device names, as long as it has the memory."""

from __future__ import annotations

import logging
import re
from typing import Any, NamedTuple

import faiss

from vse.pipeline.errors import UserError

GPU_RESULTS = 2048  # of a query, the most that FAISS finds on a GPU; and of an IVF index, the most lists that it looks into
log = logging.getLogger(__name__)


class FaissGpu(NamedTuple):
    """What FAISS needs to compute on a GPU, and the number of that GPU."""

    resources: Any
    number: int


_current: dict[str, FaissGpu | None] = {}
"""The GPU in use, once it was looked for; empty before."""


def use_device(name: str) -> None:
    """Let FAISS compute on ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:1``.

    Where FAISS has no such GPU, e.g. because it was built for processors alone, it computes on the processor and says so.
    :class:`UserError` for any other name.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {name}: FAISS knows auto, cpu, cuda and cuda:N")
    _current["gpu"] = None if name == "cpu" else _gpu(int(name.partition(":")[2] or 0), asked=name != "auto")


def gpu() -> FaissGpu | None:
    """The GPU that FAISS computes on; None for the processor."""
    if "gpu" not in _current:
        use_device("auto")
    return _current["gpu"]


def fall_back_to_cpu(error: Exception) -> None:
    """Compute on the processor from now on, because the GPU failed; that is said."""
    log.warning("FAISS computes on the processor from here on: its GPU failed (%s)", faiss_reason(error))
    _current["gpu"] = None


def faiss_reason(error: Exception) -> str:
    """What FAISS says went wrong, without the place in its source."""
    text = " ".join(str(error).split())
    return re.sub(r"^Error in .*?\.(cpp|cu|h):\d+: (Error: '.*?' failed: ?)?", "", text) or type(error).__name__


def _gpu(number: int, asked: bool) -> FaissGpu | None:
    if number >= faiss.get_num_gpus():
        if asked:
            log.warning("FAISS has no GPU %d here; it computes on the processor", number)
        return None
    try:
        return FaissGpu(faiss.StandardGpuResources(), number)
    except RuntimeError as error:
        log.warning("FAISS computes on the processor: GPU %d cannot be used (%s)", number, faiss_reason(error))
        return None


class GpuIndex:
    """A copy of an index on a GPU; where that fails in a search, the index itself is searched, and so from then on."""

    def __init__(self, index: Any, copy: Any) -> None:
        self._index, self._copy = index, copy
        self.ntotal = int(index.ntotal)

    def search(self, queries: Any, k: int) -> Any:
        """As an index of FAISS."""
        if self._copy is not None:
            try:
                return self._copy.search(queries, k)
            except RuntimeError as error:
                self._copy = None
                fall_back_to_cpu(error)
        return self._index.search(queries, k)


def copy_to_gpu(index: Any, k: int) -> Any:
    """A copy on the GPU, if there is one and it can search for ``k`` results by such an index; else the index itself.

    :class:`UserError` if the index is to look into more lists than it could on a GPU.
    """
    used = gpu()
    graph = isinstance(faiss.downcast_index(index), faiss.IndexHNSW)
    if used is None or graph or k > GPU_RESULTS:
        return index
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None and lists.nprobe > GPU_RESULTS:
        raise UserError(
            f"nprobe={lists.nprobe}: on a GPU FAISS looks into {GPU_RESULTS} lists at most; lower it, or give --device cpu"
        )
    try:
        return GpuIndex(index, faiss.index_cpu_to_gpu(used.resources, used.number, index))
    except RuntimeError as error:
        log.info("the index is searched by the processor: %s", faiss_reason(error))
        return index

"""The GPU on which FAISS searches. If a search on the GPU fails, e.g. for lack of memory, FAISS uses the CPU from then on."""

from __future__ import annotations

import logging
import re
from typing import Any, NamedTuple

import faiss

from vse.pipeline.errors import UserError

GPU_SEARCH_LIMIT = 2048  # most results of a query, and most lists of an IVF index, on a GPU
log = logging.getLogger(__name__)


class FaissGpu(NamedTuple):
    """The FAISS resources of a GPU, and the number of this GPU (1 for ``cuda:1``)."""

    resources: Any
    number: int


_chosen_gpu: dict[str, FaissGpu | None] = {}
"""The value of the key ``gpu`` is the GPU that FAISS uses, or None for the CPU. Without a key no GPU was chosen yet."""


def choose_faiss_device(name: str) -> None:
    """Let FAISS search on ``cpu``, ``cuda``, ``cuda:1`` or ``auto`` (a GPU if there is one). Raises UserError for other names.

    If the GPU does not exist, FAISS uses the CPU, and a warning is logged.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {name}: FAISS knows auto, cpu, cuda and cuda:N")
    _chosen_gpu["gpu"] = None if name == "cpu" else _open_gpu(int(name.partition(":")[2] or 0), requested=name != "auto")


def current_gpu() -> FaissGpu | None:
    """Return the GPU that FAISS uses; None for the CPU."""
    if "gpu" not in _chosen_gpu:
        choose_faiss_device("auto")
    return _chosen_gpu["gpu"]


def fall_back_to_cpu(error: Exception) -> None:
    """Let FAISS use the CPU from now on, because the GPU failed with ``error``, and log a warning."""
    log.warning("FAISS uses the CPU from now on because its GPU failed (%s)", strip_faiss_location(error))
    _chosen_gpu["gpu"] = None


def strip_faiss_location(error: Exception) -> str:
    """Return the message of a FAISS error without the file and line of the source code where it was raised."""
    text = " ".join(str(error).split())
    return re.sub(r"^Error in .*?\.(cpp|cu|h):\d+: (Error: '.*?' failed: ?)?", "", text) or type(error).__name__


def _open_gpu(number: int, requested: bool) -> FaissGpu | None:
    if number >= faiss.get_num_gpus():
        if requested:
            log.warning("FAISS has no GPU %d here and uses the CPU", number)
        return None
    try:
        return FaissGpu(faiss.StandardGpuResources(), number)
    except RuntimeError as error:
        log.warning("FAISS uses the CPU because GPU %d cannot be used (%s)", number, strip_faiss_location(error))
        return None


class GpuIndex:
    """A copy of a FAISS index on a GPU. If a search on the GPU fails, the original on the CPU answers from then on."""

    def __init__(self, index: Any, copy: Any) -> None:
        self._index, self._copy = index, copy
        self.ntotal = int(index.ntotal)

    def search(self, queries: Any, k: int) -> Any:
        if self._copy is not None:
            try:
                return self._copy.search(queries, k)
            except RuntimeError as error:
                self._copy = None
                fall_back_to_cpu(error)
        return self._index.search(queries, k)


def copy_to_gpu(index: Any, k: int) -> Any:
    """Return a copy of an index on the GPU, or the index itself if FAISS uses the CPU, or if a GPU cannot search the index.

    A GPU cannot search HNSW indexes, nor return more than :data:`GPU_SEARCH_LIMIT` results (``k``) for a query. Raises
    UserError if the index is set to search more lists (``nprobe``) than a GPU can search.
    """
    used = current_gpu()
    graph = isinstance(faiss.downcast_index(index), faiss.IndexHNSW)
    if used is None or graph or k > GPU_SEARCH_LIMIT:
        return index
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None and lists.nprobe > GPU_SEARCH_LIMIT:
        raise UserError(
            f"nprobe={lists.nprobe}: on a GPU FAISS searches at most {GPU_SEARCH_LIMIT} lists; use a lower number, "
            "or --device cpu"
        )
    try:
        return GpuIndex(index, faiss.index_cpu_to_gpu(used.resources, used.number, index))
    except RuntimeError as error:
        log.info("the index is searched on the CPU: %s", strip_faiss_location(error))
        return index

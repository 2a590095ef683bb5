"""The searcher that answered last, kept for the next query in the same process."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vse.features.caption_extractor import encoder_path
from vse.features.shards import shards_folder
from vse.pipeline.input_files import FileState, file_state
from vse.train.use.embed import TrainedRun
from vse.train.use.searcher import Searcher


@dataclass(frozen=True)
class _Kept:
    """A searcher, what was asked for when it was made, and the states that its files had."""

    asked_for: Hashable
    searcher: Searcher
    states: Mapping[Path, FileState | None]


class LastSearcher:
    """Keeps one searcher, which is given back for the same request while all files that it was made from are as they were."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def searcher(self, asked_for: Hashable) -> Searcher | None:
        """The searcher that was kept, if it is what is asked for; else it is forgotten."""
        kept = self._kept
        as_it_was = kept is not None and all(file_state(file) == state for file, state in kept.states.items())
        if kept is not None and as_it_was and kept.asked_for == asked_for:
            return kept.searcher
        self._kept = None
        return None

    def keep(self, asked_for: Hashable, searcher: Searcher, files: Iterable[Path], started: int) -> None:
        """Keep a searcher that was made from the time ``started`` on, of its run and of ``files``.

        Not if one of them was written shortly before, or since: what was read may not be what is there.
        """
        states = {file: file_state(file) for file in (*_files_of(searcher.trained), *files)}
        if all(state is None or state.is_settled(started) for state in states.values()):
            self._kept = _Kept(asked_for, searcher, states)


LAST = LastSearcher()


def _files_of(trained: TrainedRun) -> list[Path]:
    """The files that a run is opened from. Weights of networks that others made are not among them."""
    caches = [cache for cache in (trained.cache, trained.caption_cache) if cache is not None]
    return [
        *trained.folder.files,
        *trained.folder.code_folder.glob("*"),
        trained.dataset.path,
        *(cache.path for cache in caches),
        *(encoder_path(cache.path) for cache in caches),
        *(shards_folder(cache.path) / "manifest.json" for cache in caches),
        *(shard["features"].path for cache in caches for shard in cache.shards),
    ]

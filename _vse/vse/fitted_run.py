"""A run that was trained on arrays, held in memory without its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from vse.eval.search.top_k import SearchHit
from vse.features.exchange.array_data import ARRAYS_NAME, ArrayData
from vse.pipeline.dataset.preparation import check_dataset_output
from vse.pipeline.files.writing import lock_for_writing, write_bytes
from vse.pipeline.presets.preset_files import read_yaml

if TYPE_CHECKING:
    from vse.training.kinds import PackedEmbeddings
    from vse.training.use.arrays import ArrayEncoder
    from vse.training.use.searcher import Searcher

DATA_FOLDER = "data"  # in the folder of the run


@dataclass(frozen=True)
class FittedRun:
    """A run in memory.

    ``record``, ``settings`` : the content of ``run.json`` and of ``config.yaml``.
    ``frame`` : the metrics of each epoch.
    ``arrays`` : the loaded model.
    ``files`` : the content of each file of the run by its path in the folder, without the checkpoint.
    ``photos`` : the path of the photo of each image, as far as they are known.
    ``has_texts`` : whether the captions are texts.
    """

    record: dict[str, Any]
    settings: dict[str, Any]
    frame: pd.DataFrame
    arrays: ArrayEncoder
    files: Mapping[Path, bytes]
    photos: Sequence[str]
    has_texts: bool

    @classmethod
    def read(
        cls,
        folder: Path,
        data: ArrayData,
        photos: Sequence[str] | None,
        device: str,
    ) -> FittedRun:
        """Read a run that was trained on ``data``. The folder is not needed afterwards."""
        from vse.training.run.folder import RunFolder
        from vse.training.use.arrays import hold_in_memory

        run = RunFolder(folder)
        files = {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path != run.checkpoint_file and not path.name.startswith(".")
        }
        return cls(
            record=run.read_record(),
            settings=read_yaml(run.config_file),
            frame=pd.read_csv(run.metrics_file),
            arrays=hold_in_memory(folder, data, device),
            files=files,
            photos=photos or (),
            has_texts=data.texts is not None,
        )

    def search(self, query: PackedEmbeddings, k: int, by_image: bool) -> list[SearchHit]:
        """Return the best captions for an image, or the best images for a caption, given its embedding."""
        from vse.training.use.queries import EncodedQuery

        hits = self._searcher.answer(by_image, EncodedQuery(query.unpack_all()), k).hits
        return [replace(hit, photo=self._find_photo(hit), captions=hit.captions if self.has_texts else ()) for hit in hits]

    def _find_photo(self, hit: SearchHit) -> Path | None:
        return Path(self.photos[hit.image_id]) if hit.image_id < len(self.photos) else None

    @cached_property
    def _searcher(self) -> Searcher:
        from vse.training.use.searcher import Searcher

        return Searcher(self.arrays.trained, None)

    def write(self, folder: Path) -> None:
        """Write the run to ``folder``. A run that is already there is replaced."""
        from vse.training.run.folder import RunFolder

        out = RunFolder(folder)
        with lock_for_writing(folder, folder=True):
            out.check_output_folder([])
            check_dataset_output(folder / DATA_FOLDER, ARRAYS_NAME)
            for old in out.output_files:
                old.unlink(missing_ok=True)
            record = out.record_file.relative_to(folder)
            for name in sorted(self.files, key=lambda name: name == record):  # without its record the folder is no run
                write_bytes(folder / name, self.files[name])

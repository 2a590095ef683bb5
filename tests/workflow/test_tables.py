"""Plan all tables of the papers on stand-ins for MS-COCO and Flickr30K."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.workflow.test_workflow import Work
from vse.eval.options import published_table_names
from vse.eval.tables.published_rows import table_experiments

FILES = (
    "coco/dataset_coco.json",
    "coco/images/train2014/1.jpg",
    "coco/images/val2014/1.jpg",
    "f30k/dataset_flickr30k.json",
    "f30k/flickr30k-images/1.jpg",
    *(f"entities/{name}" for name in ("train.txt", "val.txt", "test.txt", "UNRELATED_CAPTIONS", "flickr30k-images/1.jpg")),
    "entities/Annotations/1.xml",
    "entities/Sentences/1.txt",
    "words.txt",
    "features/coco_bottom_up.h5",  # imported
)
CONFIG = ("coco_dir=coco", "f30k_dir=f30k", "f30k_entities_dir=entities", "words=words.txt")


@pytest.mark.nightly
def test_each_table_of_the_papers_is_planned_with_the_split_of_each_row(tmp_path: Path, commands: Path) -> None:
    work = Work(tmp_path, commands)
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    tables = [f"results/tables/{name}.csv" for name in published_table_names()]
    plan = work.make("--dry-run", *tables, "--config", *CONFIG)
    planned = set(re.findall(r"^evaluate (\S+)", plan, re.MULTILINE))
    expected = {
        f"{dataset}_{experiment}" for name in published_table_names() for dataset, experiment in table_experiments(name)
    }
    assert planned == expected
    assert len(re.findall(r"^published table \S+ csv", plan, re.MULTILINE)) == len(tables) == 14
    # The two-branch paper tests its own networks on the split of Flickr30K Entities. It cites CCA on that of Karpathy.
    own = {name for name in planned if re.match(r"f30k.*_(twobranch|similarity|phrase)", name)}
    assert own == {name for name in planned if name.startswith("f30k_entities_")} - {"f30k_entities_cca"}
    assert {f"f30k_{name}" for name in ("cca", "cca_mean_vector", "cca_gmm_hglmm", "vsepp", "vse0_rc")} <= planned

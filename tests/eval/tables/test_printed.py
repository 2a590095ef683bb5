"""The printed figures that ship with the package. Those below were read in the papers and typed here by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

from vse.eval.options import published_table_names
from vse.eval.tables.published_rows import published_rows, table_experiments
from vse.pipeline.errors import UserError
from vse.pipeline.presets import presets

TABLES = {"ace_1": 6, "todnet_1": 6, "todnet_4": 7, "todnet_5": 14, "todnet_6": 16}
TABLES |= {"twobranch_1": 14, "twobranch_2": 16, "twobranch_3": 14, "twobranch_4": 6, "twobranch_5": 2}
TABLES |= {"vsepp_1": 14, "vsepp_2": 12, "vsepp_3": 17, "vsepp_4": 5}
# Table, row, system, data set, protocol, number of images, figures.
PRINTED = """
vsepp_1     | vsepp 1.3        | Embedding Net              | coco | 1k        | 1000 | 50.4 79.3 69.4 - 39.8 75.3 86.6 -
vsepp_1     | vsepp 1.6        | VSE++                      | coco | 1k-single | 1000 | 43.6 74.8 84.6 2.0 33.7 68.8 81.0 3.0
vsepp_1     | vsepp 1.11       | VSE++ (ResNet, FT)         | coco | 1k        | 1000 | 64.6 90.0 95.7 1.0 52.0 84.3 92.0 1.0
vsepp_1     | vsepp 1.13       | VSE++ (FT)                 | coco | full      | 5000 | 32.9 61.7 74.7 3.0 24.1 52.8 66.2 5.0
vsepp_2     | vsepp 2.3        | VSE0                       | coco | 1k        | 1000 | 46.8 78.8 89.0 1.8 34.2 70.4 83.6 2.6
vsepp_2     | vsepp 1.10       | VSE++ (ResNet)             | coco | 1k        | 1000 | 58.3 86.1 93.3 1.0 43.6 77.6 87.8 2.0
vsepp_3     | vsepp 3.10       | VSE++                      | f30k | 1k        | 1000 | 31.9 58.4 68.0 4.0 23.1 49.2 60.7 6.0
vsepp_3     | vsepp 3.16       | VSE0 (ResNet, FT)          | f30k | 1k        | 1000 | 42.1 73.2 84.0 2.0 31.8 62.6 74.1 3.0
vsepp_4     | vsepp 4.1        | Order                      | coco | 1k        | 1000 | 46.7 - 88.9 2.0 37.9 - 85.9 2.0
vsepp_4     | vsepp 4.5        | Order++                    | coco | 1k        | 1000 | 53.0 83.4 91.9 1.0 42.3 77.4 88.1 2.0
ace_1       | ace 1.2          | VSE++ (VGG-19)             | coco | 1k-single | 1000 | 43.6 74.8 84.6 33.7 68.8 81.0
ace_1       | ace 1.3          | ACE VSE++ (VGG-19)         | coco | 1k        | 1000 | 44.5 75.4 86.3 34.6 69.1 81.8
ace_1       | ace 1.6          | SCAN + Compositional ADV   | coco | 1k        | 1000 | 70.5 94.8 98.3 53.7 85.7 93.6
todnet_1    | todnet 1.4       | DSVE-loc + TOD-Net         | coco | 1k        | 1000 | 72.3 93.4 97.4 58.5 88.3 94.6 84.1
todnet_4    | todnet 4.2       | VSE++ without TOD-Net      | coco | 1k        | 1000 | 65.9 90.7 96.2 52.9 84.6 92.4 80.5
todnet_5    | todnet 5.8       | GXN                        | coco | 1k        | 1000 | 68.5 - 97.9 56.6 - 94.5 -
todnet_6    | todnet 5.13      | TOD-Net + DSVE-loc         | coco | 1k        | 1000 | 72.6 93.4 97.3 58.6 88.4 94.6 84.2
todnet_6    | todnet 6.14      | TOD-Net + BERT             | coco | 1k        | 1000 | 78.1 96.0 98.6 63.6 90.6 95.8 87.1
twobranch_1 | twobranch 1.a1   | CCA baseline               | f30k_entities | phrase | - | - 64.52 70.77
twobranch_1 | twobranch 1.c4   | Similarity Network         | f30k_entities | phrase | - | 51.05 70.30 75.04
twobranch_1 | twobranch 1.fc1  | Similarity Network         | f30k_entities | phrase | - | 36.61 - -
twobranch_2 | twobranch 2.a8   | Two-way Nets               | f30k | 1k        | 1000 | 49.8 67.5 - 36.0 55.6 -
twobranch_2 | twobranch 2.b6   | Embedding Network          | f30k | 1k        | 1000 | 43.2 71.6 79.8 31.7 61.3 72.4
twobranch_2 | twobranch 2.d1   | Similarity Network         | f30k | 1k        | 1000 | 16.6 38.8 51.0 7.4 23.5 33.3
twobranch_3 | twobranch 3.a1   | Mean vector                | coco | 1k-single | 1000 | - - 75.1 24.2 56.4 72.4
twobranch_3 | twobranch 3.a2   | CCA (FV HGLMM) of Klein et al. | coco | 1k-single | 1000 | - - 79.1 24.9 58.8 76.5
twobranch_3 | twobranch 3.a3   | CCA (FV GMM+HGLMM)         | coco | 1k-single | 1000 | - - 80.9 25.1 59.8 76.6
twobranch_3 | twobranch 3.a8   | OrderEmbedding             | coco | 1k-single | 1000 | - - 88.9 37.9 - 85.9
twobranch_3 | twobranch 3.a9   | Two-way Nets               | coco | 1k-single | 1000 | - - - 39.7 - -
twobranch_3 | twobranch 3.c1   | Embedding Network (LSTM)   | coco | 1k-single | 1000 | 54.0 84.0 91.2 43.3 76.8 87.6
twobranch_4 | twobranch 4.f3   | Embedding Network          | f30k | sentence  | 1000 | 63.8 84.1 90.2
twobranch_4 | twobranch 4.c2   | Embedding Network          | coco | sentence-1k | 1000 | 54.3 78.8 86.9
twobranch_5 | twobranch 5.2    | Weighted distance          | f30k | 1k        | 1000 | 43.8 72.1 80.4 33.5 62.4 73.9
"""


def test_every_table_is_there_with_all_its_rows() -> None:
    assert {table: len(published_rows(table)) for table in published_table_names()} == TABLES
    assert [row.row_number for row in published_rows("vsepp_2")][:4] == ["2.1", "1.6", "2.2", "1.7"], (
        "as the paper repeats rows"
    )
    with pytest.raises(UserError, match="unknown table 'vsepp_5' \\(did you mean 'vsepp_"):
        published_rows("vsepp_5")


def test_metrics_are_those_of_the_papers() -> None:
    for line in PRINTED.strip().splitlines():
        table, key, system, dataset, protocol, images, printed = (part.strip() for part in line.split("|"))
        row = next(row for row in published_rows(table) if row.key == key)
        assert (row.system, row.dataset, row.protocol) == (system, dataset, protocol)
        assert row.n_images == (None if images == "-" else int(images))
        assert list(row.metrics.values()) == [None if text == "-" else float(text) for text in printed.split()], line


def test_a_row_is_printed_once_and_its_source_says_where() -> None:
    own = Counter(row.key for table in TABLES for row in published_rows(table) if row.row_number.startswith(f"{table[-1]}."))
    assert set(own.values()) == {1}
    assert len(own) == 141
    sources = {row.key: row.source for table in TABLES for row in published_rows(table)}
    assert len(set(sources.values())) == len(sources)
    assert sources["vsepp 4.4"] == "Faghri et al., BMVC 2018, Table 4, row 4.4"
    assert sources["todnet 6.14"] == "Matsubara et al., arXiv 2019, Table VI, row 16"
    assert sources["twobranch 1.fc2"] == "Wang et al., TPAMI 2018, section 4.4, 2 FC layers"


def test_metrics_of_a_row_go_together() -> None:
    """But for a misprint that is kept, R@K grows with K; and mR is the mean of the six recalls."""
    for row in (row for table in TABLES for row in published_rows(table) if row.key != "vsepp 1.3"):
        six = []
        for direction in ("i2t", "t2i", "s2s", "phrase"):
            recalls = [row.metrics.get(f"{direction}_r{k}") for k in (1, 5, 10)]
            there = [recall for recall in recalls if recall is not None]
            assert there == sorted(there), row
            six += there if direction in ("i2t", "t2i") else []
        if row.metrics.get("mean_recall") is not None and len(six) == 6:
            assert row.metrics["mean_recall"] == pytest.approx(sum(six) / 6, abs=0.11), row


def test_the_rows_that_presets_name_are_there() -> None:
    keys = {row.key for table in TABLES for row in published_rows(table)}
    for name in presets.list_preset_names("experiments"):
        assert set(presets.load_experiment_outline(name).rows) <= keys, name


def test_the_experiments_of_a_table_are_those_of_its_rows() -> None:
    four = ["vse0_10c_rv", "order0_10c_rv", "vsepp_10c_rv", "orderpp_10c_rv"]
    assert table_experiments("vsepp_4") == [("coco", name) for name in four]
    assert table_experiments("vsepp_4", "demo") == [("demo", name) for name in four]
    three = [f"twobranch{name}" for name in ("", "_sampling", "_constraints")]
    assert table_experiments("twobranch_4") == [(dataset, name) for dataset in ("f30k_entities", "coco") for name in three]
    assert table_experiments("twobranch_4", "demo") == [("demo", name) for name in three]
    todnet = ["vsepp_resnet_ft_rv", "todnet_vsepp", "dsve", "todnet_dsve", "bert", "todnet_bert"]
    assert table_experiments("todnet_1") == [("coco", name) for name in todnet]
    assert table_experiments("twobranch_5") == [
        ("f30k_entities", name) for name in ("twobranch_constraints", "twobranch_phrases")
    ]


def test_one_row_is_not_two_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.yaml").write_text(yaml.dump({"extends": "vsepp", "rows": ["vsepp 4.4"]}))
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    assert len(table_experiments("vsepp_3")) == 10
    with pytest.raises(UserError, match="mine and vsepp_10c_rv, name the row vsepp 4.4"):
        table_experiments("vsepp_4")


@pytest.mark.parametrize("rows", ["vsepp 4.4", "[[vsepp 4.4]]", "[{vsepp: 4.4}]", "[4.4]", ""])
def test_rows_that_are_not_texts_are_refused(rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.yaml").write_text(f"extends: vsepp\nrows: {rows}\n")
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    with pytest.raises(UserError, match=r"experiment 'mine'.*rows"):
        table_experiments("vsepp_4")

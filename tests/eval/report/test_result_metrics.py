from __future__ import annotations

from typing import Any

from vse.eval.files.results import Result
from vse.eval.report.sections import build_sections, select_headline_metrics

DIRECTION = {"r1": 10.0, "r5": 20.0, "r10": 30.0, "medr": 4.0, "meanr": 5.5}
BOTH = {"i2t": DIRECTION, "t2i": {**DIRECTION, "r1": 5.0}, "rsum": 115.0, "mean_recall": 19.2}


def result(n_images: int = 2000, **protocols: Any) -> Result:
    described = {"dataset": "demo", "experiment": "vsepp", "split": "test", "seeds": [0]}
    return Result.model_validate({**described, "n_images": n_images, "n_captions": 5 * n_images, "protocols": protocols})


def test_a_fold_that_is_the_whole_split_is_shown_once() -> None:
    fold = {"folds": 1, **BOTH, "per_fold": [BOTH]}
    one, two = result(1000, **{"1k": fold, "full": BOTH}), result(2000, **{"1k": {**fold, "folds": 2}, "full": BOTH})
    assert [section.title for section in build_sections([one])] == ["all 1,000 images and 5,000 captions"]
    titles = ["1,000 images, mean of 2 folds", "all 2,000 images and 10,000 captions"]
    assert [section.title for section in build_sections([two])] == titles
    assert len(build_sections([result(1000, **{"1k": fold})])) == 1


def test_a_table_has_a_row_for_each_direction_and_result_and_the_sums_below() -> None:
    (section,) = build_sections([result(full=BOTH), result(full={**BOTH, "rsum": 90.0})])
    assert section.columns == ["R@1", "R@5", "R@10", "Med r", "mean r"]
    assert [(row.direction_title, row.result_index) for row in section.rows] == [
        ("image to text", 0), ("image to text", 1), ("text to image", 0), ("text to image", 1)
    ]  # fmt: skip
    assert [cell.text for cell in section.rows[2].metrics] == ["5.0", "20.0", "30.0", "4.0", "5.5"]
    assert [(series, name, metric.text) for series, name, metric in section.overall_metrics] == [
        (0, "rsum", "115.0"), (0, "mean recall", "19.2"), (1, "rsum", "90.0"), (1, "mean recall", "19.2")
    ]  # fmt: skip


def test_metrics_other_than_recalls_stand_in_the_table_alone_and_missing_ones_are_dashes() -> None:
    (section,) = build_sections([result(eccv={"i2t": {"map_at_r": 30.0, "rprecision": 40.0}, "n_queries": {"i2t": 1261}})])
    assert (section.title, section.columns) == ("ECCV Caption", ["mAP@R", "R-Precision"])
    assert (len(section.rows), section.chart) == (1, None)
    (section,) = build_sections([result(cxc={"i2t": {"r1": 10.0}}), result(cxc={"i2t": {"r1": 11.0, "r5": 22.0}})])
    assert [[cell.text for cell in row.metrics] for row in section.rows] == [["10.0", "–"], ["11.0", "22.0"]]


def test_seeds_and_intervals_are_distinguished() -> None:
    seeds = {"i2t": {"r1": {"mean": 10.0, "std": 1.0}}}
    (section,) = build_sections([result(full=seeds)])
    (cell,) = section.rows[0].metrics
    assert (cell.text, cell.interval_text, cell.whisker()) == ("10.0 ± 1.0", "", (9.0, 11.0))
    assert section.notes == "±: standard deviation over seeds. Whiskers: one standard deviation on each side."
    (section,) = build_sections([result(full={**seeds, "ci95": {"i2t": {"r1": [7.0, 14.0]}}})])
    (cell,) = section.rows[0].metrics
    assert (cell.text, cell.interval_text, cell.whisker()) == ("10.0 ± 1.0", "7.0 – 14.0", (7.0, 14.0))
    assert len(section.rows) == 1, "ci95 is no direction"


def test_the_headline_is_of_the_whole_split_if_that_is_there() -> None:
    other = {**BOTH, "rsum": 200.0}
    headline = select_headline_metrics(result(**{"1k": other, "full": BOTH}))
    assert [metric.value for _, metric in headline] == [115.0, 10.0, 5.0, 4.0, 4.0]
    assert select_headline_metrics(result(**{"1k": other}))[0][1].value == 200.0
    assert select_headline_metrics(result(sentence={"s2s": DIRECTION})) == []
    assert select_headline_metrics(result(full={"rsum": 3.0}))[0][1].text == "3.0"
    assert build_sections([result(full={})])[0].rows == []

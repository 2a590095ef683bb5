"""Published tables with measured metrics next to the printed ones."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from pydantic import ValidationError

from tests.eval.evaluating import Edit, Fails, succeeds, write_result
from vse.eval.cli import table_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.files.results import hash_file_content
from vse.eval.options import AllEvaluateOptions, TableRequest, published_table_names
from vse.eval.tables.published import PublishedTable, compare_published
from vse.eval.tables.published_rows import published_rows
from vse.eval.tables.summary import build_summary
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_json
from vse.pipeline.presets import presets
from vse.training.experiment import ExperimentConfig, list_changed_settings, load_experiment
from vse.training.kinds import InputKind

MEASURED = ("_ours", "_std", "_difference")


@dataclass
class Results:
    """Results of made embeddings, by the evaluator itself; ``config`` is what a training would have noted."""

    folder: Path

    def __call__(
        self,
        experiment: str,
        dataset: str = "coco",
        n_images: int = 1000,
        n_each: int = 1,
        seeds: Sequence[int] = (0,),
        split: str = "test",
        protocol: str | Sequence[str] = "auto",
        config: dict[str, Any] | None = None,
    ) -> Path:
        files = []
        ids, of = np.arange(n_images * n_each), np.repeat(np.arange(n_images), n_each)
        for seed in seeds:
            rng = np.random.default_rng(seed)
            images = rng.normal(size=(n_images, 8)).astype(np.float32)
            captions = images[of] + rng.normal(size=(len(of), 8)).astype(np.float32)
            units = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (images, captions)]
            note = json.dumps(noted(config, dataset) if config else {})
            named = {"experiment": experiment, "seed": seed, "provenance": note}
            made = Embeddings(ids[:n_images], ids, of, dataset, split, *units, **named)
            files.append(write_embeddings(self.folder / f"{seed}.h5", made))
        options = AllEvaluateOptions(bootstrap=0, cross_check=False)
        return write_result(files, self.folder / f"{dataset}_{experiment}.json", protocol, options)


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    """Images are counted from 0; as many as the papers have are called their test splits."""
    made = {n: sha256_json(list(range(n))) for n in (1000, 2000, 5000)}
    (tmp_path / "published").mkdir()
    splits = {"coco": {"karpathy": list(made.values())}, "f30k": {"karpathy": made[1000], "entities": made[2000]}}
    splits["f30k_entities"] = {"entities": made[1000]}
    (tmp_path / "published" / "splits.yaml").write_text(yaml.dump(splits))
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    return Results(tmp_path)


def settings(preset: str, dataset: str | None = None, /, **changes: Any) -> dict[str, Any]:
    experiment = load_experiment(preset, dataset)
    model = experiment.model.with_default_caption_encoder(InputKind.WORDS)  # as training resolves it
    return presets.merge_settings(experiment.model_copy(update={"model": model}).model_dump(mode="json"), changes)


def noted(config: dict[str, Any], dataset: str) -> dict[str, Any]:
    """What training notes of its settings; nothing of the changes if they are not of this version."""
    try:
        return {"config": config, "changed_settings": list_changed_settings(ExperimentConfig.model_validate(config), dataset)}
    except ValidationError:
        return {"config": config}


def measured(path: Path, protocol: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(path.read_text())["protocols"][protocol]
    return figures


def line(table: pd.DataFrame, row: str) -> pd.Series:
    return table.set_index("row").loc[row]


def filled(table: pd.DataFrame) -> list[str]:
    """The rows with any measured figure."""
    columns = [name for name in table if str(name).endswith(MEASURED)]
    return list(table["row"][table[columns].notna().any(axis=1)])


@pytest.mark.parametrize("name", published_table_names())
def test_a_table_without_results_has_the_printed_figures_alone(name: str, tmp_path: Path) -> None:
    table = compare_published(name, [])
    assert filled(table) == []
    succeeds(table_main, name, "--out", tmp_path / "t.csv")
    read = pd.read_csv(tmp_path / "t.csv")
    assert list(read["row"]) == list(table["row"])
    for column in read:
        if str(column).endswith("_published"):
            pd.testing.assert_series_equal(read[column], table[column])
        elif str(column).endswith(MEASURED) or column in ("experiment", "seeds"):
            assert read[column].isna().all()


@pytest.mark.parametrize("seeds", [(0,), (0, 3, 5)])
def test_a_result_fills_its_row_and_no_other(seeds: tuple[int, ...], result: Results) -> None:
    path = result("vsepp_10c_rv", seeds=seeds)
    table = compare_published("vsepp_4", [path])
    assert filled(table) == ["vsepp 4.4"]
    row, ours = line(table, "vsepp 4.4"), measured(path, "1k")
    named = ("experiment", "seeds", "our_dataset", "our_images", "system", "setting", "dataset", "protocol")
    seen = " ".join(map(str, seeds))
    assert [row[name] for name in named] == ["vsepp_10c_rv", seen, "coco", 1000, "VSE++", "10C+rV", "coco", "1k"]
    for column, printed in (("i2t_r1", 51.3), ("i2t_medr", 1.2), ("t2i_r10", 86.1)):
        direction, name = column.split("_")
        value, mean = ours[direction][name], ours[direction][name] if len(seeds) == 1 else ours[direction][name]["mean"]
        assert (row[f"{column}_published"], row[f"{column}_ours"]) == (printed, mean)
        assert row[f"{column}_difference"] == pytest.approx(mean - printed)
        assert np.isnan(row[f"{column}_std"]) if len(seeds) == 1 else row[f"{column}_std"] == value["std"]


def test_a_row_of_one_fold_is_the_first_fold_and_may_be_in_two_tables(result: Results) -> None:
    path = result("vsepp", n_images=2000)
    fold = measured(path, "1k")["per_fold"][0]["i2t"]["r1"]
    ours = line(compare_published("vsepp_1", [path]), "vsepp 1.6")["i2t_r1_ours"]
    assert ours == fold != measured(path, "1k")["i2t"]["r1"]
    assert filled(compare_published("vsepp_2", [path])) == ["vsepp 1.6"]


def test_one_result_may_be_rows_of_two_protocols(result: Results) -> None:
    path = result("vsepp_ft_rv", n_images=5000)
    table = compare_published("vsepp_1", [path])
    assert filled(table) == ["vsepp 1.9", "vsepp 1.13"]
    assert line(table, "vsepp 1.9")["i2t_r1_difference"] == pytest.approx(measured(path, "1k")["i2t"]["r1"] - 57.2)
    row = line(table, "vsepp 1.13")
    assert (row["our_images"], row["i2t_r1_ours"]) == (5000, measured(path, "full")["i2t"]["r1"])
    assert row["i2t_r1_difference"] == pytest.approx(measured(path, "full")["i2t"]["r1"] - 32.9)
    fewer = compare_published("vsepp_1", [result("vsepp_ft_rv", n_images=2000)])
    assert line(fewer, "vsepp 1.9")["i2t_r1_difference"] != 0
    row = line(fewer, "vsepp 1.13")  # retrieval among 2,000 images is easier than among 5,000
    assert (row["images"], row["our_images"], row["i2t_r1_ours"] > 0) == (5000, 2000, True)
    assert np.isnan(row["i2t_r1_difference"])


def test_sentence_figures_go_to_the_rows_of_their_data_set(result: Results) -> None:
    sentences = ["auto", "sentence", "sentence-1k"]
    paths = [result("twobranch", name, n, 2, protocol=sentences) for name, n in (("f30k", 1000), ("coco", 2100))]
    table = compare_published("twobranch_4", paths)
    assert filled(table) == ["twobranch 4.f1", "twobranch 4.c1"]
    for key, path, protocol in zip(filled(table), paths, sentences[1:], strict=True):
        row = line(table, key)
        assert (row["protocol"], row["our_images"]) == (protocol, 1000), "on COCO as the mean over folds"
        assert row["s2s_r5_ours"] == measured(path, protocol)["s2s"]["r5"]
    assert measured(paths[1], "sentence")["s2s"]["r5"] < measured(paths[1], "sentence-1k")["s2s"]["r5"]


def test_mean_recall_is_compared_too(result: Results) -> None:
    path = result("mine", config={"rows": ["todnet 1.1"]})
    row = line(compare_published("todnet_1", [path]), "todnet 1.1")
    assert row["mean_recall_ours"] == measured(path, "1k")["mean_recall"]
    assert row["mean_recall_difference"] == pytest.approx(measured(path, "1k")["mean_recall"] - 80.5)
    assert filled(compare_published("twobranch_2", [result("cca", "f30k")])) == ["twobranch 2.a5", "twobranch 2.a7"]


def test_figures_of_another_data_set_are_shown_without_differences(result: Results) -> None:
    names = ("vse0_10c_rv", "vsepp_10c_rv")
    table = compare_published("vsepp_4", [result(name, "demo") for name in names], "demo")
    assert filled(table) == ["vsepp 4.2", "vsepp 4.4"]
    assert (set(table["our_dataset"]), set(table["dataset"])) == ({"", "demo"}, {"coco"})
    assert table[[name for name in table if str(name).endswith("_difference")]].isna().all(axis=None)
    sentences = result("twobranch", "demo", 1000, 2, protocol=["sentence", "sentence-1k"])
    assert filled(compare_published("twobranch_4", [sentences], "demo")) == ["twobranch 4.f1", "twobranch 4.c1"]
    same = compare_published("vsepp_4", [result("vsepp_10c_rv")], "coco")
    assert same["i2t_r1_difference"].notna().any()


def test_a_difference_is_of_the_same_test_images(result: Results, caplog: pytest.LogCaptureFixture) -> None:
    """The two-branch paper's Flickr30K is another split than Karpathy's, and its images of COCO are known to nobody."""
    karpathy = result("twobranch", "f30k", 1000, 2, protocol=["auto", "sentence"])
    row = line(compare_published("twobranch_2", [karpathy]), "twobranch 2.b4")
    assert (row["split"], row["our_split"], row["our_images"]) == ("entities", "karpathy", 1000)
    assert row["i2t_r1_ours"] > 0
    assert np.isnan(row["i2t_r1_difference"])
    assert f"{karpathy}: no difference from twobranch 2.b4" in caplog.text
    entities = result("twobranch", "f30k_entities", 1000, 2)
    row = line(compare_published("twobranch_2", [entities]), "twobranch 2.b4")
    assert (row["dataset"], row["our_dataset"], row["our_split"]) == ("f30k", "f30k_entities", "entities")
    assert row["i2t_r1_difference"] == pytest.approx(measured(entities, "1k")["i2t"]["r1"] - 40.5)
    coco = result("twobranch", "coco", 5000)
    row = line(compare_published("twobranch_3", [coco]), "twobranch 3.b1")
    assert (row["split"], row["our_split"]) == ("random", "karpathy")
    assert np.isnan(row["i2t_r1_difference"])


def test_features_that_have_seen_the_test_images_have_no_difference(result: Results, caplog: pytest.LogCaptureFixture) -> None:
    """The detector of the feature regions was trained on COCO's train2017, with most test photographs."""
    name = "scan_i2t_avg_bottom_up"
    seen = result(name, "coco", 5000, config=settings(name, "coco", feature="regions"))
    row = line(compare_published("todnet_6", [seen]), "todnet 6.2")
    assert np.isnan(row["i2t_r1_difference"])
    assert "regions: trained on test images of coco" in row["changed"]
    assert "the feature regions were trained on test images of coco" in caplog.text
    grid = result(name, "coco", 5000, config=settings(name, "coco", feature="resnet_grid"))
    row = line(compare_published("todnet_6", [grid]), "todnet 6.2")
    assert not np.isnan(row["i2t_r1_difference"])


def test_test_images_without_a_name_are_those_of_no_row(result: Results, edit: Edit) -> None:
    def forget(content: dict[str, Any]) -> None:
        del content["split_identity"]
        content["sha256"] = hash_file_content(content)

    unnamed = result("vsepp_10c_rv", n_images=1001)
    row = line(compare_published("vsepp_4", [unnamed]), "vsepp 4.4")
    assert (row["split"], row["our_split"]) == ("karpathy", sha256_json(list(range(1001)))[:12])
    older = line(compare_published("vsepp_4", [edit(unnamed, forget)]), "vsepp 4.4")
    assert older["our_split"] == ""
    for each in (row, older):
        assert each["i2t_r1_ours"] > 0
        assert np.isnan(each["i2t_r1_difference"])


def test_the_rows_of_a_run_are_those_that_its_settings_name(result: Results, tmp_path: Path) -> None:
    own = settings("vsepp_10c_rv", rows=["vsepp 4.2"], name="mine")
    assert filled(compare_published("vsepp_4", [result("mine", config=own)])) == ["vsepp 4.2"]
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.yaml").write_text(yaml.dump({"extends": "vsepp", "rows": ["ace 1.3"]}))
    assert filled(compare_published("ace_1", [result("mine")])) == ["ace 1.3"], "a preset of one's own names rows, too"


def test_a_run_that_is_older_than_the_row_s_name_is_that_row_if_its_settings_are(result: Results) -> None:
    older = settings("vsepp_10c_rv", rows=[])
    assert filled(compare_published("vsepp_4", [result("vsepp_10c_rv", config=older)])) == ["vsepp 4.4"]
    other = result("vsepp_10c_rv", config={**older, "loss": {"margin": 0.5}})
    with pytest.raises(UserError, match="no result belongs to a row of vsepp_4"):
        compare_published("vsepp_4", [other])


@pytest.mark.parametrize(
    ("dataset", "changes", "changed", "experiment"),
    [
        ("coco", {}, "", "vsepp_10c_rv"),
        (
            "coco",
            {"loss": {"margin": 0.1}, "train": {"precision": "bf16", "memory_gb": 9.0}},
            "loss.margin: 0.2 -> 0.1; train.precision: fp32 -> bf16",
            "vsepp_10c_rv[margin=0.1, precision=bf16]",
        ),
        ("demo", {}, "", "vsepp_10c_rv"),  # what the data set's preset changes is not the user's change
        ("demo", {"unheard": 1}, "settings of another version", "vsepp_10c_rv"),
    ],
)
def test_changed_settings_are_named(
    dataset: str, changes: dict[str, Any], changed: str, experiment: str, result: Results
) -> None:
    config = settings("vsepp_10c_rv", None if dataset == "coco" else dataset, **changes)
    path = result("vsepp_10c_rv", dataset, config=config)
    row = line(compare_published("vsepp_4", [path], dataset), "vsepp 4.4")
    assert (row["changed"], row["experiment"]) == (changed, experiment)
    assert row["feature"] == "fc7_10c"


def test_results_of_other_tables_are_left_out_and_said(result: Results, caplog: pytest.LogCaptureFixture) -> None:
    mine, other = result("vsepp_10c_rv"), result("vse0_rc")
    assert filled(compare_published("vsepp_4", [other, mine])) == ["vsepp 4.4"]
    assert f"{other} is left out: no row of vsepp_4 is the experiment vse0_rc" in caplog.text
    with pytest.raises(UserError, match="its rows are the experiments vse0_10c_rv, order0_10c_rv"):
        compare_published("vsepp_4", [other])
    with pytest.raises(UserError, match="both belong to the row vsepp 4.4"):
        compare_published("vsepp_4", [mine, result("mine", config={"rows": ["vsepp 4.4"]})])


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a metric": lambda content: content["protocols"]["1k"]["i2t"].update(r1=99.9),
    "the data set": lambda content: content.update(dataset="coco"),
    "the split": lambda content: content.update(split="test"),
    "the settings": lambda content: content["provenance"]["config"].update(rows=["vsepp 4.5"]),
    "a seed": lambda content: content["seeds"].append(1),
    "something more": lambda content: content.update(note="mine"),
}


def test_an_edited_result_is_refused(result: Results, edit: Edit, fails: Fails) -> None:
    path, out = result("vsepp_10c_rv", "f30k", split="val"), result.folder / "t.csv"
    written = path.read_bytes()
    for change in EDITS.values():
        path.write_bytes(written)
        edit(path, change)
        for command in (("vsepp_4",), ("summary",)):
            assert f"{path}: was edited after vse-eval wrote it" in fails(table_main, *command, path, "--out", out)
    path.write_bytes(written)
    edit(path, lambda content: content.pop("sha256"))
    assert f"{path}: has no sha256" in fails(table_main, "vsepp_4", path, "--out", out)
    assert len(build_summary([path])) == 1
    path.write_bytes(written[:-40])
    assert f"{path}: not valid JSON" in fails(table_main, "vsepp_4", path, "--out", out)
    assert not out.exists()
    path.write_text(json.dumps(dict(reversed(json.loads(written).items())), indent=4))  # the same content
    assert len(build_summary([path])) == 1


@pytest.mark.parametrize(
    ("table", "made", "reason"),
    [
        ("vsepp_4", (("vsepp_10c_rv", "f30k"), {}), "the data set 'f30k', but vsepp 4.4 needs coco"),
        ("vsepp_4 --dataset demo", (("vsepp_10c_rv",), {}), "the data set 'coco', but vsepp 4.4 needs demo"),
        ("twobranch_4", (("twobranch", "demo", 50, 2), {"protocol": "sentence"}), "needs f30k and coco"),
        ("vsepp_4", (("vsepp_10c_rv",), {"split": "val"}), "the split 'val'"),
        ("vsepp_4", (("vsepp_10c_rv",), {"protocol": "full"}), "lacks the protocol 1k of the row vsepp 4.4 (it has full)"),
        ("vsepp_4", (("vsepp_10c_rv",), {"n_images": 50}), "it needs 1000 images, there are 50"),
        ("twobranch_4", (("twobranch", "f30k"), {}), "--protocol sentence"),
        ("twobranch_4", (("twobranch", "coco", 50, 2), {"protocol": "sentence"}), "it needs 1000 images"),
        ("twobranch_1", (("mine", "f30k_entities"), {"config": {"rows": ["twobranch 1.b1"]}}), "lacks the protocol phrase"),
    ],
)
def test_what_the_table_does_not_ask_for_is_refused_with_the_reason(
    table: str, made: tuple[tuple[Any, ...], dict[str, Any]], reason: str, result: Results, fails: Fails
) -> None:
    path, out = result(*made[0], **made[1]), result.folder / "t.csv"
    name, *options = table.split()
    message = fails(table_main, name, path, *options, "--out", out)
    assert reason in message
    assert str(path) in message
    assert not out.exists()


@pytest.fixture
def latex(tmp_path: Path, result: Results) -> dict[str, str]:
    """Every table as LaTeX: some with metrics of one seed, of several, with changed settings, of another data set."""
    result_files = {
        "vsepp_4": [result("vsepp_10c_rv", seeds=(0, 1), config=settings("vsepp_10c_rv", loss={"margin": 0.1}))],
        "twobranch_4": [result("twobranch", "f30k", 50, 2, protocol="sentence")],
        "todnet_1": [result("my_100%_&_best", config={"rows": ["todnet 1.1"]})],
    }
    for name in published_table_names():
        PublishedTable(name).build(TableRequest(results=result_files.get(name, [])), tmp_path / f"{name}.tex")
    return {name: (tmp_path / f"{name}.tex").read_text() for name in published_table_names()}


def test_our_results_in_a_published_table_have_letters(result: Results, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [result(preset, protocol=("1k", "full"), seeds=(seed,)) for seed, preset in enumerate(("vse0_rc", "vsepp_rc"))]
    table = compare_published("vsepp_2", paths, family="holm")
    assert [line(table, row)["group"] for row in filled(table)] == ["a", "a"]
    assert (table["group"] != "").sum() == 2
    succeeds(table_main, "vsepp_2", *paths, "--family", "holm")
    assert "1 comparison, p-values corrected by holm" in capsys.readouterr().out


def test_latex_has_ours_and_the_difference_under_the_printed_row(tmp_path: Path, latex: dict[str, str]) -> None:
    texts = latex
    ours = measured(tmp_path / "coco_vsepp_10c_rv.json", "1k")["i2t"]["r1"]
    lines = texts["vsepp_4"].splitlines()
    k = next(k for k, text in enumerate(lines) if text.startswith("4.4 & VSE++ & 10C+rV & coco & 1k & 51.3 & 82.2"))
    assert lines[k + 1].startswith(" & ours: VSE++ (10C+rV)[margin=0.1] & seeds 0 1, changed settings & coco & 1k & ")
    assert f"& {ours['mean']:.1f} $\\pm$ {ours['std']:.1f} &" in lines[k + 1]
    sign = "$-$" if ours["mean"] < 51.3 else "+"
    assert lines[k + 2].startswith(f" & difference &  &  &  & {sign}{abs(ours['mean'] - 51.3):.1f} & ")
    assert lines[k + 3].startswith("4.5 & Order++")
    assert "% vsepp 4.4: Faghri et al., BMVC 2018, Table 4, row 4.4" in lines
    assert "ours: my\\_100\\%\\_\\&\\_best & seed 0 & coco" in texts["todnet_1"]
    assert "ours: Embedding Network & seed 0 & f30k & sentence, 50 images & " in texts["twobranch_4"]
    assert "difference" not in texts["twobranch_4"]
    assert "& 51.05 & 70.30 & 75.04 \\\\" in texts["twobranch_1"], "as many digits as were printed"
    assert "\\begin{tabular}{lp{4.5cm}p{4.5cm}llrrrrrr}\n" in texts["twobranch_2"], "long texts are broken"
    for text in texts.values():
        rules = [rule for rule in ("\\toprule", "\\midrule", "\\bottomrule") if text.count(rule) == 1]
        assert len(rules) == 3
        assert "nan" not in text.lower()
        body = text[text.index("\\midrule") : text.index("\\bottomrule")].splitlines()[1:]
        assert len({row.replace("\\&", "").count("&") for row in body}) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(tmp_path: Path, latex: dict[str, str]) -> None:
    names = list(latex)
    lines = ["\\documentclass{article}", "\\usepackage{booktabs,graphicx}"]
    lines += ["\\begin{document}", *(f"\\noindent\\input{{{name}.tex}}\n\\par" for name in names), "\\end{document}"]
    (tmp_path / "all.tex").write_text("\n".join(lines))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Overfull \\hbox" not in done.stdout, "wider than the page"
    assert (tmp_path / "all.pdf").stat().st_size > 10_000


def test_an_ensemble_is_its_row_unless_a_member_was_changed(tmp_path: Path, result: Results) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "duo.yaml").write_text("title: Both\nrows: [vsepp 4.1]\nensemble_of: [vsepp, vse0]")
    for changes, shown in (({}, ""), ({"loss": {"margin": 0.1}}, "vsepp.loss.margin: 0.2 -> 0.1")):
        files = []
        for name, changed in (("vsepp", changes), ("vse0", {})):
            result(name, config=settings(name, **changed))
            files.append((tmp_path / "0.h5").rename(tmp_path / f"{name}.h5"))
        path = write_result(
            files, tmp_path / "duo.json", options=AllEvaluateOptions(bootstrap=0, ensemble=True, experiment="duo")
        )
        table = compare_published("vsepp_4", [path])
        assert filled(table) == ["vsepp 4.1"]
        row = line(table, "vsepp 4.1")
        assert (row["experiment"], row["changed"]) == ("duo" + ("[margin=0.1]" if shown else ""), shown)


def test_a_difference_within_our_interval_is_marked(tmp_path: Path, result: Results) -> None:
    (printed,) = [row for row in published_rows("vsepp_1") if row.key == "vsepp 1.6"]
    target = printed.metrics["i2t_r1"]
    # As many images as printed find their caption first, the others only after all captions.
    ids = np.arange(1000)
    scores = np.diag(np.where(ids < 10 * target, 1, -1)).astype(np.float32)
    run = Embeddings(ids, ids, ids, "coco", "test", scores=scores, experiment="vsepp", seed=0, similarity="network")
    file = write_result([write_embeddings(tmp_path / "e.h5", run)], tmp_path / "r.json")
    table = compare_published("vsepp_1", [file])
    (row,) = table[table["experiment"] == "vsepp"].to_dict("records")
    low, high = json.loads(file.read_text())["protocols"]["1k"]["ci95"]["i2t"]["r1"]
    assert (row["i2t_r1_low"], row["i2t_r1_high"]) == (low, high)
    assert low < target < high
    assert row["i2t_r1_significant"] == "no"
    assert row["i2t_r5_significant"] == row["i2t_r10_significant"] == "yes"  # the same recall, far below the printed ones
    assert set(table.loc[table["experiment"] == "", "i2t_r1_significant"]) == {""}
    text = PublishedTable("published").write(table, tmp_path / "t.tex").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(" & difference")]
    one, five = (f"{row[f'i2t_r{k}_difference']:+.1f}".replace("-", "$-$") for k in (1, 5))
    assert line.startswith(f" & difference &  &  &  & ({one}) & {five} &")

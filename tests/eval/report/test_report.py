from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.eval.evaluating import write_result
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings
from vse.eval.files.results import content_sha256
from vse.eval.options import EvaluationOptions
from vse.eval.report.charts import Curve
from vse.eval.report.report import flatten_settings, write_report
from vse.pipeline.dataset import dataset as dataset_module
from vse.pipeline.dataset.columns import columns_file
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.train.cli import report_main

N_IMAGES, N_EACH = 12, 2
EVIL_NAME = "<script src=x> & 'y'"  # names of data sets have no slash
EVIL = "<script>alert(1)</script> & \"x\" 'y' $_^$"


def fails_with(pattern: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(UserError, match=pattern):
        write_report(*arguments, **options)


class World:
    """A data set of photos, with results of models that know more or less of it; every test has its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data" / "dataset.json"
        (self.data.parent / "images").mkdir(parents=True)
        images = []
        for i in range(N_IMAGES):
            Image.new("RGB", (40 + i, 30), (20 * i, 90, 200)).save(self.data.parent / "images" / f"{i}.png")
            sentences = [
                {"sentid": 100 * i + c, "imgid": i, "raw": f"caption {c} of {i}", "tokens": ["a"]} for c in range(N_EACH)
            ]
            images.append({"imgid": i, "filename": f"{i}.png", "split": "test", "sentences": sentences})
        self.data.write_text(json.dumps({"dataset": "tiny", "images": images}))

    def change(self, how: Callable[[dict[str, Any]], None]) -> None:
        content = json.loads(self.data.read_text())
        how(content)
        self.data.write_text(json.dumps(content))

    def embeddings(self, experiment: str = "model", seed: int = 0, noise: float = 0.6, **changed: Any) -> Path:
        """Embeddings in the folder of a run, and its curve; the images stand in another order than in the data set."""
        rng = np.random.default_rng(seed + len(experiment))
        ids = np.arange(N_IMAGES)[::-1].copy()
        images = np.eye(N_IMAGES, dtype=np.float32)
        image_of_caption = np.repeat(np.arange(N_IMAGES), N_EACH)
        captions = (images[image_of_caption] + noise * rng.random((len(image_of_caption), N_IMAGES))).astype(np.float32)
        folder = self.folder / "runs" / f"tiny_{experiment}" / f"seed-{seed}"
        caption_ids = 100 * ids[image_of_caption] + np.tile(np.arange(N_EACH), N_IMAGES)
        note = {
            "captions": "../../../data/dataset.json",
            "config": {"loss": {"margin": noise}},
            "features": {"fc7": "0123456789ab"},
        }
        run = Embeddings(
            ids, caption_ids, ids[image_of_caption], "tiny", "test", images, captions, experiment=experiment, seed=seed
        )
        write_embeddings(folder / "test.h5", replace(run, **{"provenance": json.dumps(note), **changed}))
        (folder / "metrics.csv").write_text("epoch,loss,rsum\n1,3.5,100\n2,2.5,300\n3,2.0,200\n")
        record = {"dataset": "tiny", "experiment": experiment, "seed": seed, "best_epoch": 2, "epochs": 3, "device": "cpu"}
        (folder / "run.json").write_text(json.dumps(record))
        return folder / "test.h5"

    def result(self, *files: Path, **options: Any) -> Path:
        files = files or (self.embeddings(**options),)
        name = files[0].parent.parent.name
        return write_result(files, self.folder / "results" / f"{name}.json", options=EvaluationOptions(bootstrap=100))

    def page(self, *results: Path, **options: Any) -> str:
        return write_report(results, self.folder / "page.html", **options).read_text()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def cards(page: str, direction: str) -> list[str]:
    """The cards of one direction."""
    section = page.split(f'<h2 id="{direction}">')[1].split("<h2")[0]
    return section.split("<article")[1:]


def captions_of(card: str) -> list[tuple[str, str]]:
    """Of each caption in a card, right or wrong, and its words."""
    return re.findall(r'<li class="(right|wrong)[^"]*">.*?</span><span>(.*?)\s*<', card)


def test_a_page_says_what_was_run_and_how_well_it_did(world: World) -> None:
    result = world.result()
    page = world.page(result)
    full = json.loads(result.read_text())["protocols"]["full"]
    assert "<title>tiny model</title>" in page
    for text in (
        "tiny, split test: 12 images, 24 captions",
        "best epoch 2 of 3",
        "fc7 (0123456789ab)",
        "margin 0.6",
        "loss:\n  margin",
    ):
        assert text in page
    assert f"<b>{full['rsum']:.1f}</b>" in page
    low, high = full["ci95"]["i2t"]["r1"]
    assert f"{full['i2t']['r1']:.1f}<small>{low:.1f} – {high:.1f}</small>" in page
    for label in ("Recalls, all 12 images", "Training loss", "Validation rsum", "Ranks of right answers, image to text"):
        assert f'aria-label="{label}' in page
    assert "Not displayed here" not in page


def test_a_result_without_intervals_has_bars_without_whiskers(world: World, edit: Callable[..., Path]) -> None:
    def without(content: dict[str, Any]) -> None:
        del content["protocols"]["full"]["ci95"], content["sha256"]

    page = world.page(edit(world.result(), without))
    assert 'aria-label="Recalls, all 12 images' in page
    assert "whiskers" not in page


def test_several_seeds_have_deviations_and_a_curve_each(world: World) -> None:
    one = world.page(world.result(world.embeddings(seed=0)))
    several = world.page(world.result(world.embeddings(seed=0), world.embeddings(seed=1)))
    assert "±" not in one
    assert re.search(r"\d ± \d", several)

    def rsum_curves(page: str) -> int:
        return page.split('aria-label="Validation rsum"')[1].split("</svg>")[0].count("stroke-width: 1.4")

    assert (rsum_curves(one), rsum_curves(several)) == (1, 2)


def test_right_captions_are_marked_as_right(world: World) -> None:
    page = world.page(world.result(noise=2.0), queries=24)
    shown = cards(page, "i2t")
    assert len(shown) >= 6
    for card in shown:
        alt = re.search(r'alt="caption 0 of (\d+)"', card)
        assert alt
        found = captions_of(card)
        assert len(found) in (5, 6)
        for mark, caption in found:
            assert (mark == "right") == caption.endswith(f" of {alt[1]}")
        assert card.count("✓") == sum(mark == "right" for mark, _ in found) > 0


def test_right_photos_are_marked_as_right(world: World) -> None:
    page = world.page(world.result(noise=2.0), queries=24)
    shown = cards(page, "t2i")
    assert len(shown) >= 6
    for card in shown:
        query = re.search(r"“caption \d of (\d+)”", card)
        assert query
        found = re.findall(r'<figure class="(right|wrong)[^"]*">.*?alt="caption 0 of (\d+)"', card, re.DOTALL)
        assert len(found) in (5, 6)
        assert [image for mark, image in found if mark == "right"] == [query[1]]


def test_a_right_answer_beyond_the_best_five_follows_with_its_rank(world: World) -> None:
    image_of_caption = np.repeat(np.arange(N_IMAGES), N_EACH)
    images = np.eye(N_IMAGES, dtype=np.float32)
    run = world.embeddings(images=-images, captions=images[image_of_caption])  # the right answer scores lowest of all
    page = world.page(world.result(run))
    for direction, rank in (("i2t", 23), ("t2i", 12)):
        for card in cards(page, direction):
            assert f"right answer at rank <b>{rank}</b>" in card
            assert card.count("✓") == 1
            assert card.count("✗") == 5
    assert "Right answer at rank 1" not in page


def test_equal_scores_count_against_the_model(world: World) -> None:
    same = np.ones((N_IMAGES, 3), np.float32)
    page = world.page(world.result(world.embeddings(images=same, captions=np.ones((24, 3), np.float32))))
    assert all("right answer at rank <b>23</b>" in card and card.count("✗") == 5 for card in cards(page, "i2t"))


def test_an_image_without_a_caption_is_found_but_does_not_ask(world: World) -> None:
    run = world.embeddings(noise=2.0)
    whole = read_embeddings(run)
    asking = whole.caption_image_ids != 6
    ids = {name: getattr(whole, name)[asking] for name in ("caption_ids", "caption_image_ids")}
    page = world.page(world.result(world.embeddings(noise=2.0, captions=np.array(whole.captions[asking]), **ids)), queries=99)
    shown = {int(query) for card in cards(page, "i2t") for query in re.findall(r'alt="caption 0 of (\d+)"', card)}
    assert shown <= {*range(N_IMAGES)} - {6}
    for card in cards(page, "i2t"):
        query = re.search(r'alt="caption 0 of (\d+)"', card)
        assert query
        assert all((mark == "right") == caption.endswith(f" of {query[1]}") for mark, caption in captions_of(card))
    assert any('alt="caption 0 of 6"' in card for card in cards(page, "t2i"))


@pytest.mark.parametrize("kind", ["order", "scores", "directional"])
def test_scores_and_other_similarities_work_too(world: World, kind: str) -> None:
    rng = np.random.default_rng(0)
    changed: dict[str, Any] = {"similarity": "order"}
    if kind == "scores":
        changed = {"images": None, "captions": None, "scores": rng.random((N_IMAGES, 24)).astype(np.float32)}
    elif kind == "directional":
        i2t, t2i = rng.random((2, N_IMAGES, 24)).astype(np.float32)
        changed = {"images": None, "captions": None, "scores_i2t": i2t, "scores_t2i": t2i}
    page = world.page(world.result(world.embeddings(**changed)))
    assert len(cards(page, "i2t")) >= 4
    assert len(cards(page, "t2i")) >= 4
    assert {"order": "<dd>order</dd>", "scores": "scores of pairs", "directional": "scores of each direction"}[kind] in page


def test_whatever_a_data_set_says_is_text(world: World) -> None:
    def poison(content: dict[str, Any]) -> None:
        content["dataset"] = EVIL_NAME
        for image in content["images"]:
            path = world.data.parent / "images" / image["filename"]
            image["filename"] = path.rename(path.with_name(f"<i>&{path.name}")).name
            for sentence in image["sentences"]:
                sentence["raw"] = EVIL

    world.change(poison)
    (world.data.parent / "images" / "<i>&3.png").write_bytes(b"broken")
    note = json.dumps({"captions": "../../../data/dataset.json", "config": {EVIL: EVIL}, "features": {EVIL: EVIL}})
    run = world.embeddings(dataset=EVIL_NAME, experiment="<b>a", provenance=note)
    record = {"experiment": "<b>a", "best_epoch": EVIL, "device": EVIL}
    (run.parent / "run.json").write_text(json.dumps(record))
    page = world.page(write_result([run], world.folder / "r.json", options=EvaluationOptions(bootstrap=0)), queries=36)
    assert "<script" not in page
    assert "<i>" not in page
    assert "<b>a" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; " in page
    assert EVIL in unescape(page)


def test_two_results_stand_side_by_side_on_the_same_queries(world: World) -> None:
    good, bad = world.result(experiment="good", noise=0.1), world.result(experiment="worse", noise=3.0)
    page = world.page(good, bad)
    assert "<title>tiny good and worse</title>" in page
    assert re.search(r"<td>loss.margin</td><td>0.1</td><td>3.0</td>", page)
    assert "A ranks the right answer higher" in page
    for direction in ("i2t", "t2i"):
        factors = []
        for card in cards(page, direction):
            a, b = map(int, re.findall(r"right answer at rank <b>(\d+)</b>", card))
            assert a < b, "the good model is never worse"
            factors.append(b / a)
        assert factors == sorted(factors, reverse=True)
    counts = re.search(r"Of 24 queries, A ranks the right answer higher in (\d+), B in 0; in (\d+) both", page)
    assert counts
    assert int(counts[1]) + int(counts[2]) == 24


def test_two_results_are_told_apart_by_a_paired_test(world: World) -> None:
    good, bad = world.result(experiment="good", noise=0.1), world.result(experiment="worse", noise=3.0)
    page = world.page(good, bad, queries=0).split("A minus B, on the same queries")[1].split("</table>")[0]
    a, b = (json.loads(result.read_text())["protocols"]["full"] for result in (good, bad))
    rows = re.findall(
        r"<tr><td>(.*?)</td><td class=\"n\">(.*?)</td><td class=\"n\">(.*?)</td><td class=\"n\">(.*?)</td>", page
    )
    assert [name for name, *_ in rows][::3] == ["image to text R@1", "text to image R@1", "rsum"]
    shown = {name: (text, p) for name, text, _, p in rows}
    assert shown["rsum"][0] == f"<b>{a['rsum'] - b['rsum']:+.1f}</b>"
    for name, direction, figure in (("image to text R@10", "i2t", "r10"), ("text to image R@1", "t2i", "r1")):
        text, p = shown[name]
        significant = p == "below 0.001" or float(p) < 0.05
        expected = f"{a[direction][figure] - b[direction][figure]:+.1f}"
        assert text == (f"<b>{expected}</b>" if significant else f"({expected})")
    assert "A minus B" not in world.page(good)


def test_two_results_are_joined_by_id_whatever_their_order(world: World) -> None:
    first = world.result(experiment="good", noise=0.1)
    straight = world.embeddings(experiment="worse", noise=3.0)
    before = world.page(first, world.result(straight))
    images, captions = np.random.default_rng(0).permutation(N_IMAGES), np.random.default_rng(1).permutation(24)
    run = read_embeddings(straight)
    shuffled = replace(run, image_ids=run.image_ids[images], images=np.array(run.images[images]),
                       caption_ids=run.caption_ids[captions], caption_image_ids=run.caption_image_ids[captions],
                       captions=np.array(run.captions[captions]))  # fmt: skip
    write_embeddings(straight, shuffled)
    after = world.page(first, world.result(straight))
    for direction in ("i2t", "t2i"):
        assert cards(before, direction) == cards(after, direction)


def test_results_of_other_queries_do_not_stand_side_by_side(world: World) -> None:
    first = world.result()
    other = world.result(world.embeddings(experiment="other", caption_ids=np.arange(24)))
    fails_with(
        r"other.json and .*model.json have different queries: \d+ is in the caption_ids of one",
        [first, other],
        world.folder / "x",
    )
    split = world.result(world.embeddings(experiment="split", split="val"))
    fails_with(r"split.json has split 'val', .*model.json has 'test'", [first, split], world.folder / "x")


def test_hardest_negatives_of_the_last_epoch_are_shown(world: World) -> None:
    run = world.embeddings()
    header = "epoch,query,cost,imgid,sentid,negative_imgid,negative_sentid,caption,negative_caption\n"
    rows = [
        "1,image,9,0,0,1,100,old,old",
        "2,image,0.25,0,0,1,100,NA,a <b>",
        "2,image,0.5,2,200,3,300,harder,c",
        "2,caption,0.125,4,4,77,5,e,f",
    ]
    (run.parent / "negatives.csv").write_text(header + "\n".join(rows) + "\n")
    page = world.page(world.result(run))
    section = page.split('<h2 id="negatives">')[1]
    assert "in epoch 2, seed 0" in section
    assert re.findall(r"cost ([\d.]+)", section) == ["0.500", "0.250", "0.125"]
    assert "old" not in section
    assert "</span> NA</p>" in section
    assert "a &lt;b&gt;" in section
    assert "image 77" in section, "a photo that the data set lacks is a frame"


def test_photos_that_cannot_be_read_are_frames(world: World) -> None:
    result = world.result()
    (world.data.parent / "images" / "3.png").unlink()
    (world.data.parent / "images" / "4.png").write_bytes(b"no photo")
    page = world.page(result, queries=36)
    assert "2 photos could not be read" in page
    assert 'aria-label="caption 0 of 3">no photo<br>3.png</span>' in page
    assert 'alt="caption 0 of 5"' in page


def test_a_data_set_without_photos_shows_captions(world: World) -> None:
    world.change(lambda content: content.update(pictures=False))
    page = world.page(world.result())
    assert "the data set has no photos" in page
    assert "<img" not in page
    assert len(cards(page, "t2i")) >= 4


def test_what_was_moved_is_missed_in_one_line_and_found_when_named(world: World) -> None:
    run = world.embeddings()
    result = world.result(run)
    whole = world.page(result)
    moved = world.folder / "elsewhere"
    moved.mkdir()
    shutil.move(world.data.parent, moved / "data")
    page = world.page(result)
    assert "dataset.json is not where the embeddings record it (give --data)" in page
    assert '<h2 id="ranks">' in page
    assert "<article" not in page
    assert world.page(result, data=moved / "data" / "dataset.json") == whole
    shutil.move(run.parent, moved / "run")
    page = world.page(result)
    assert "(give --embeddings)" in page
    assert '<h2 id="ranks">' not in page
    assert 'aria-label="Recalls, all 12 images' in page
    data, embeddings = moved / "data" / "dataset.json", [moved / "run" / "test.h5"]
    assert world.page(result, data=data, embeddings=embeddings) == whole


def test_without_curves_and_record_the_page_says_so(world: World) -> None:
    run = world.embeddings()
    (run.parent / "metrics.csv").unlink()
    (run.parent / "run.json").unlink()
    page = world.page(world.result(run))
    assert "no metrics.csv of the run" in page
    assert '<h2 id="training">' not in page
    assert '<h2 id="ranks">' in page


def test_curves_of_another_run_are_not_taken_for_the_result_s(world: World) -> None:
    run = world.embeddings()
    (run.parent / "run.json").write_text(json.dumps({"experiment": "another"}))
    assert '<h2 id="training">' not in world.page(world.result(run))


def test_cca_has_a_curve_over_its_regularisations(world: World) -> None:
    run = world.embeddings()
    (run.parent / "metrics.csv").write_text("epoch,regularization,rsum\n1,0.01,100\n2,0.1,120\n")
    page = world.page(world.result(run))
    assert 'aria-label="Validation rsum by regularisation"' in page
    assert 'aria-label="Training loss"' not in page


def test_the_epoch_of_the_highest_rsum_is_marked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Curve] = []

    def draw(label: str, x_label: str, y_label: str, curves: list[Curve], **options: Any) -> str:
        drawn.extend(curves)
        return ""

    monkeypatch.setattr("vse.eval.report.report.draw_training_curves", draw)
    world.page(world.result())
    assert drawn == [Curve(0, [1, 2, 3], [3.5, 2.5, 2.0], None), Curve(0, [1, 2, 3], [100, 300, 200], 2)]


def test_the_report_says_where_the_loss_changes_and_what_chance_is(world: World) -> None:
    def with_validation(content: dict[str, Any]) -> None:
        for image in content["images"][:4]:
            number = image["imgid"] + 50
            sentences = [{**s, "imgid": number, "sentid": s["sentid"] + 5000} for s in image["sentences"]]
            content["images"].append(
                {**image, "imgid": number, "filename": f"v{number}.png", "split": "val", "sentences": sentences}
            )

    world.change(with_validation)
    config = {"warmup": {"epochs": 2, "loss": "sum"}, "loss": {"name": "max"}}
    note = json.dumps({"captions": "../../../data/dataset.json", "config": config})
    page = world.page(world.result(world.embeddings(provenance=note)))
    assert page.count(">warm-up<") == 2, "in the curves of the loss and of rsum"
    assert page.count(">chance<") == 1
    assert "for 2 epochs, the loss of model is sum (warm-up), then max: losses on the two sides" in page
    assert "Dotted lines: chance, R@1 / 5 / 10 of 8.3 / 38.0 / 67.0 image to text, 8.3 / 41.7 / 83.3 text to image" in page


@pytest.mark.parametrize("epochs", [0, 3, "2", None])
def test_a_loss_that_never_changes_has_no_line(epochs: Any, world: World) -> None:
    note = json.dumps({"config": {"warmup": {"epochs": epochs, "loss": "sum"}}})
    assert ">warm-up<" not in world.page(world.result(world.embeddings(provenance=note)))


@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_an_ensemble_is_shown_by_the_scores_of_all_its_members_and_the_first_seed(
    seeds: list[int], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.folder / "experiments").mkdir()
    (world.folder / "experiments" / "both.yaml").write_text("ensemble_of: [vsepp, vse0]")
    monkeypatch.setenv("VSE_PRESETS", str(world.folder))
    members = [world.embeddings(experiment=name, noise=2.0, seed=seed) for seed in seeds for name in ("vsepp", "vse0")]
    out, first = (world.folder / "results" / name for name in ("both.json", "first.json"))
    result = write_result(members, out, options=EvaluationOptions(bootstrap=0, ensemble=True, experiment="both"))
    page = world.page(result, queries=36)
    ranks = [int(rank) for card in cards(page, "i2t") for rank in re.findall(r"at rank <b>(\d+)</b>", card)]
    shown = write_result(members[:2], first, options=EvaluationOptions(bootstrap=0, ensemble=True))
    recall = json.loads(shown.read_text())["protocols"]["full"]["i2t"]["r1"]
    assert len(ranks) == N_IMAGES
    assert 100 * ranks.count(1) / N_IMAGES == pytest.approx(recall)
    assert "<title>tiny both</title>" in page
    assert ", ".join(f"{name} seed {seed}" for seed in seeds for name in ("vsepp", "vse0")) in page
    assert "the result is an ensemble" in page


def test_embeddings_that_changed_are_refused(world: World) -> None:
    run = world.embeddings()
    result = world.result(run)
    other = world.embeddings(noise=0.9)
    fails_with(r"test.h5: .*tiny_model.json was computed from other embeddings", [result], world.folder / "x")
    fails_with(r"was computed from other embeddings", [result], world.folder / "x", embeddings=[other])
    assert not (world.folder / "x").exists()


def test_a_data_set_that_is_not_that_of_the_embeddings_is_refused(world: World) -> None:
    result = world.result()

    def swap(content: dict[str, Any]) -> None:
        for sentence in content["images"][7]["sentences"] + content["images"][8]["sentences"]:
            sentence["imgid"] = 15 - sentence["imgid"]
        seventh, eighth = content["images"][7], content["images"][8]
        seventh["sentences"], eighth["sentences"] = eighth["sentences"], seventh["sentences"]

    world.change(swap)
    fails_with(r"/data/dataset.json: has no caption 800 of image 8", [result], world.folder / "x")
    world.change(swap)
    world.change(lambda content: content["images"][5]["sentences"].pop())
    fails_with(r"has no caption 501 of image 5", [result], world.folder / "x")
    world.change(lambda content: content["images"].pop(4))
    fails_with(r"has no image 4", [result], world.folder / "x")
    world.change(lambda content: content.update(dataset="another"))
    fails_with(r"is the data set 'another', the embeddings belong to 'tiny'", [result], world.folder / "x")


def test_columns_of_a_data_set_give_the_same_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    result = world.result(noise=2.0)
    parsed = world.page(result, queries=24)
    monkeypatch.setattr(dataset_module, "_LARGE", 0)
    load_dataset_file(world.data)
    assert columns_file(world.data).is_file()
    assert world.page(result, queries=24) == parsed
    world.change(lambda content: content["images"][5]["sentences"].pop())
    for _ in range(2):
        fails_with(r"has no caption 501 of image 5", [result], world.folder / "x")


@pytest.mark.parametrize(
    ("field", "value"), [("seeds", None), ("protocols", []), ("n_images", "12"), ("dataset", 3), ("split", None)]
)
def test_a_result_that_lacks_something_is_refused(world: World, edit: Callable[..., Path], field: str, value: Any) -> None:
    def spoil(content: dict[str, Any]) -> None:
        content[field] = value
        content["sha256"] = content_sha256(content)

    fails_with(f"not a result file of vse-eval: {field}: ", [edit(world.result(), spoil)], world.folder / "x")


def test_the_page_is_the_same_again_and_names_no_folder(world: World, tmp_path: Path) -> None:
    result = world.result()
    page = world.page(result)
    assert page == world.page(result)
    assert str(tmp_path) not in page


def test_the_page_loads_nothing_from_elsewhere(world: World) -> None:
    page = world.page(world.result(), world.result(experiment="other"))
    places = re.findall(r"""(?:src|href|action|data|poster)\s*=\s*["']?([^"'>\s]*)""", page) + re.findall(
        r"url\(([^)]*)\)", page
    )
    assert places
    assert all(place.startswith(("data:", "#")) for place in places)
    assert "<script" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_no_queries_means_no_gallery(world: World) -> None:
    page = world.page(world.result(), queries=0)
    assert "<article" not in page
    assert '<h2 id="ranks">' in page


def test_what_lies_beside_a_folder_that_is_a_link_is_found_as_it_was_written(world: World) -> None:
    (world.folder / "disk" / "far").mkdir(parents=True)
    (world.folder / "results").symlink_to(world.folder / "disk" / "far")
    assert "Not displayed here" not in world.page(world.result())


def test_settings_are_named_by_where_they_stand() -> None:
    assert flatten_settings({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": 1, "d": None}


def test_the_command_says_what_it_wrote(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        report_main([str(world.result()), "--out", str(world.folder / "x.html"), "--queries", "3"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"{world.folder / 'x.html'}\n"


def test_the_command_fails_in_one_line(world: World, fails: Callable[..., str]) -> None:
    result = world.result()
    out = ("--out", world.folder / "x.html")
    assert "No such file" in fails(report_main, world.folder / "none.json", *out)
    assert "one result, or two side by side, not 3" in fails(report_main, result, result, result, *out)
    assert "1 files of embeddings for 2 results" in fails(report_main, result, result, "--embeddings", result, *out)
    assert "none.h5: no such file" in fails(report_main, result, "--embeddings", world.folder / "none.h5", *out)
    assert "No such file" in fails(report_main, result, "--data", world.folder / "none.json", *out)
    (world.folder / "runs/tiny_model/seed-0/metrics.csv").write_text("loss\n3\n")
    assert "metrics.csv: lacks the column 'epoch'" in fails(report_main, result, *out)
    (world.folder / "runs/tiny_model/seed-0/run.json").write_text("{")
    assert "run.json: not valid JSON" in fails(report_main, result, *out)


@pytest.fixture
def chromium() -> Iterator[Any]:
    """Debian's chromium; where there is none the test is skipped, unless VSE_NEEDS_BROWSER is 1."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        (pytest.fail if os.environ.get("VSE_NEEDS_BROWSER") == "1" else pytest.skip)("there is no chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("two", [False, True])
def test_a_browser_shows_the_page_whole(world: World, chromium: Any, two: bool, width: int) -> None:
    long = "w" * 200  # one word, longer than a phone is wide
    world.change(lambda content: [s.update(raw=f"{EVIL} {long}") for i in content["images"] for s in i["sentences"]])
    results = [world.result(noise=0.9), *([world.result(experiment="x" * 60, noise=2.0)] if two else [])]
    path = write_report(results, world.folder / "page.html")
    page = chromium.new_page(viewport={"width": width, "height": 800})
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert said == []
    assert {url.partition(":")[0] for url in asked} <= {"file", "data"}
    assert asked.count(path.as_uri()) == 1
    widths = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(widths) > 20
    assert all(widths)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.scripts.length") == 0
    charts = page.evaluate("[...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect().width)")
    assert len(charts) == 5
    assert all(200 < chart <= width for chart in charts)
    page.close()


@pytest.mark.slow
@pytest.mark.browser
def test_a_browser_prints_the_page(world: World, chromium: Any) -> None:
    page = chromium.new_page()
    page.goto(write_report([world.result(noise=0.9)], world.folder / "page.html").as_uri())
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 less its margins
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_reader_s_colour_scheme(scheme: str, world: World, chromium: Any) -> None:
    page = chromium.new_page(color_scheme=scheme)
    page.goto(write_report([world.result(noise=0.9)], world.folder / "page.html").as_uri())

    def lightness(selector: str, which: str) -> float:
        script = "([selector, which]) => getComputedStyle(document.querySelector(selector))[which]"
        return sum(map(float, re.findall(r"\d+", page.evaluate(script, [selector, which]))[:3])) / 765

    dark = scheme == "dark"
    assert (lightness("body", "backgroundColor") < 0.2) == dark
    for text in ("body", "h2", "td", "svg text", ".quiet", ".tile span"):
        assert (lightness(text, "fill" if "svg" in text else "color") > 0.5) == dark, text
    assert (lightness(".tile", "backgroundColor") < 0.3) == dark
    page.emulate_media(media="print")
    assert lightness("body", "backgroundColor") > 0.9, "on paper it is light"
    page.close()

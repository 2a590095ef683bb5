from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.eval.evaluating import Edit, Fails, Printed, result_of, succeeds, write_result
from tests.eval.protocols.test_evaluate import made
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings
from vse.eval.options import AllEvaluateOptions
from vse.eval.report.charts import Curve
from vse.eval.report.report import write_report
from vse.pipeline.errors import UserError
from vse.training.cli import report_main

N_IMAGES, N_EACH, DATA = 12, 2, "../../../data/dataset.json"
EVIL_NAME = "<script src=x> & 'y'"  # names of data sets have no slash
EVIL = "<script>alert(1)</script> & \"x\" 'y' $_^$"


def fails_with(pattern: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(UserError, match=pattern):
        write_report(*arguments, **options)


class World:
    """A data set of photos, with results of models that know more or less of it; tests that change one have their own."""

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
        of = np.repeat(np.arange(N_IMAGES), N_EACH)
        captions = (images[of] + noise * rng.random((len(of), N_IMAGES))).astype(np.float32)
        folder = self.folder / "runs" / f"tiny_{experiment}" / f"seed-{seed}"
        caption_ids = 100 * ids[of] + np.tile(np.arange(N_EACH), N_IMAGES)
        note = {"captions": DATA, "config": {"loss": {"margin": noise}}, "features": {"fc7": "0123456789ab"}}
        named = {"experiment": experiment, "seed": seed, "provenance": json.dumps(note)}
        run = Embeddings(ids, caption_ids, ids[of], "tiny", "test", images, captions, **named)
        write_embeddings(folder / "test.h5", replace(run, **changed))
        (folder / "metrics.csv").write_text("epoch,loss,rsum\n1,3.5,100\n2,2.5,300\n3,2.0,200\n")
        record = {"dataset": "tiny", "experiment": experiment, "seed": seed, "best_epoch": 2, "epochs": 3, "device": "cpu"}
        (folder / "run.json").write_text(json.dumps(record))
        return folder / "test.h5"

    def result(self, *files: Path, **options: Any) -> Path:
        files = files or (self.embeddings(**options),)
        name = files[0].parent.parent.name
        return write_result(
            files, self.folder / "results" / f"{name}.json", options=AllEvaluateOptions(bootstrap=100, cross_check=False)
        )

    def page(self, *results: Path, **options: Any) -> str:
        return write_report(results, self.folder / "page.html", **options).read_text()

    def fails(self, pattern: str, *results: Path, **options: Any) -> None:
        fails_with(pattern, results, self.folder / "refused.html", **options)
        assert not (self.folder / "refused.html").exists()


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


def test_a_page_says_what_was_run_and_how_well_it_did(world: World, edit: Edit) -> None:
    result = world.result()
    page = world.page(result)
    full = json.loads(result.read_text())["protocols"]["full"]
    assert "<title>tiny model</title>" in page
    for text in ("tiny, split test: 12 images, 24 captions", "best epoch 2 of 3", "fc7 (0123456789ab)", "margin 0.6"):
        assert text in page
    assert f"<b>{full['rsum']:.1f}</b>" in page
    low, high = full["ci95"]["i2t"]["r1"]
    assert f"{full['i2t']['r1']:.1f}<small>{low:.1f} – {high:.1f}</small>" in page
    for label in ("Recalls, all 12 images", "Training loss", "Validation rsum", "Ranks of right answers, image to text"):
        assert f'aria-label="{label}' in page
    for text in ("Not displayed here", str(world.folder), "±", "A minus B"):
        assert text not in page
    assert world.page(result) == page, "it is the same again"
    alone = world.page(result, queries=0)
    assert ("<article" in page, "<article" in alone, '<h2 id="ranks">' in alone) == (True, False, True)

    def without(content: dict[str, Any]) -> None:
        del content["protocols"]["full"]["ci95"], content["sha256"]

    page = world.page(edit(result, without))
    assert ('aria-label="Recalls, all 12 images' in page, "whiskers" in page) == (True, False)


def test_several_seeds_have_deviations_and_a_curve_each(world: World) -> None:
    page = world.page(world.result(world.embeddings(seed=0), world.embeddings(seed=1)))
    assert re.search(r"\d ± \d", page)
    assert page.split('aria-label="Validation rsum"')[1].split("</svg>")[0].count("stroke-width: 1.4") == 2


def test_right_answers_are_marked_as_right(world: World) -> None:
    page = world.page(world.result(noise=2.0), queries=24)
    captions, photos = cards(page, "i2t"), cards(page, "t2i")
    assert len(captions) >= 6
    assert len(photos) >= 6
    for card in captions:
        (query,) = re.findall(r'alt="caption 0 of (\d+)"', card)
        found = captions_of(card)
        assert len(found) in (5, 6)
        for mark, caption in found:
            assert (mark == "right") == caption.endswith(f" of {query}")
        assert card.count("✓") == sum(mark == "right" for mark, _ in found) > 0
    for card in photos:
        (query,) = re.findall(r"“caption \d of (\d+)”", card)
        found = re.findall(r'<figure class="(right|wrong)[^"]*">.*?alt="caption 0 of (\d+)"', card, re.DOTALL)
        assert len(found) in (5, 6)
        assert [image for mark, image in found if mark == "right"] == [query]


@pytest.mark.parametrize("worst", [True, False], ids=["the right answer scores lowest", "all scores are equal"])
def test_a_right_answer_beyond_the_best_five_follows_with_its_rank(world: World, worst: bool) -> None:
    images = np.eye(N_IMAGES, dtype=np.float32) if worst else np.ones((N_IMAGES, 3), np.float32)
    page = world.page(world.result(world.embeddings(images=-images if worst else images, captions=images.repeat(N_EACH, 0))))
    for direction, rank in (("i2t", 23), ("t2i", 12)):
        for card in cards(page, direction):
            assert f"right answer at rank <b>{rank}</b>" in card
            assert (card.count("✓"), card.count("✗")) == (1, 5)
    assert "Right answer at rank 1" not in page


def test_an_image_without_a_caption_is_found_but_does_not_ask(world: World) -> None:
    whole = read_embeddings(world.embeddings(noise=2.0))
    kept = whole.caption_image_ids != 6
    some = {name: np.array(getattr(whole, name)[kept]) for name in ("captions", "caption_ids", "caption_image_ids")}
    page = world.page(world.result(world.embeddings(noise=2.0, **some)), queries=99)
    for card in cards(page, "i2t"):
        (query,) = re.findall(r'alt="caption 0 of (\d+)"', card)
        assert query != "6"
        assert all((mark == "right") == caption.endswith(f" of {query}") for mark, caption in captions_of(card))
    assert any('alt="caption 0 of 6"' in card for card in cards(page, "t2i"))


@pytest.mark.parametrize(("names", "text"), [((), "<dd>order</dd>"), (("scores",), "scores of pairs")])
def test_scores_and_other_similarities_work_too(names: tuple[str, ...], text: str, world: World) -> None:
    rng = np.random.default_rng(0)
    scores = {name: rng.random((N_IMAGES, 24)).astype(np.float32) for name in names}
    changed = {"images": None, "captions": None, **scores} if names else {"similarity": "order"}
    page = world.page(world.result(world.embeddings(**changed)))
    assert all(len(cards(page, direction)) >= 4 for direction in ("i2t", "t2i"))
    assert text in page


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
    note = json.dumps({"captions": DATA, "config": {EVIL: EVIL}, "features": {EVIL: EVIL}})
    run = world.embeddings(dataset=EVIL_NAME, experiment="<b>a", provenance=note)
    (run.parent / "run.json").write_text(json.dumps({"experiment": "<b>a", "best_epoch": EVIL, "device": EVIL}))
    page = world.page(write_result([run], world.folder / "r.json", options=AllEvaluateOptions(bootstrap=0)), queries=36)
    assert not re.search("<script|<i>|<b>a", page)
    assert EVIL in unescape(page)


def test_two_results_stand_side_by_side_on_the_same_queries(world: World) -> None:
    results = world.result(experiment="good", noise=0.1), world.result(experiment="worse", noise=3.0)
    page = world.page(*results)
    assert "<title>tiny good and worse</title>" in page
    assert re.search(r"<td>loss.<wbr>margin</td><td>0.1</td><td>3.0</td>", page)
    assert "A ranks the right answer higher" in page
    for direction in ("i2t", "t2i"):
        factors = []
        for card in cards(page, direction):
            a, b = map(int, re.findall(r"right answer at rank <b>(\d+)</b>", card))
            assert a < b, "the good model is never worse"
            factors.append(b / a)
        assert factors == sorted(factors, reverse=True)
    counts = re.search(r"Of 24 queries, A ranks the right answer higher in (\d+), B in 0; in (\d+) both", page)
    assert int(counts[1]) + int(counts[2]) == 24
    a, b = (json.loads(result.read_text())["protocols"]["full"] for result in results)
    cell = r'<td class="n">(.*?)</td>'
    rows = re.findall(
        rf'<tr><td class="direction">(.*?)</td>{cell}{cell}{cell}',
        page.split("A minus B, on the same queries")[1].split("</table>")[0],
    )
    assert [name for name, *_ in rows][::3] == ["image to text R@1", "text to image R@1", "rsum"]
    shown = {name: (text, p) for name, text, _, p in rows}
    assert shown["rsum"][0] == f"<b>{a['rsum'] - b['rsum']:+.1f}</b>"
    for name, direction, metric in (("image to text R@10", "i2t", "r10"), ("text to image R@1", "t2i", "r1")):
        text, p = shown[name]
        significant = p == "below 0.001" or float(p) < 0.05
        expected = f"{a[direction][metric] - b[direction][metric]:+.1f}"
        assert text == (f"<b>{expected}</b>" if significant else f"({expected})")
    addresses = re.findall(r"""(?:src|href|action|data|poster)\s*=\s*["']?([^"'>\s]*)""", page)
    addresses += re.findall(r"url\(([^)]*)\)", page)
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses), "nothing is loaded from elsewhere"
    assert ("<script" in page, "@import" in page, "default-src 'none'" in page) == (False, False, True)


def test_two_results_are_joined_by_id_whatever_their_order(world: World) -> None:
    first, other = world.result(experiment="good", noise=0.1), world.embeddings(experiment="worse", noise=3.0)
    before = world.page(first, world.result(other))
    run, rng = read_embeddings(other), np.random.default_rng(0)
    images, captions = rng.permutation(N_IMAGES), rng.permutation(24)
    shuffled = {name: np.array(getattr(run, name)[images]) for name in ("image_ids", "images")}
    shuffled |= {name: np.array(getattr(run, name)[captions]) for name in ("caption_ids", "caption_image_ids", "captions")}
    write_embeddings(other, replace(run, **shuffled))
    after = world.page(first, world.result(other))
    for direction in ("i2t", "t2i"):
        assert cards(before, direction) == cards(after, direction)


def test_results_of_other_queries_do_not_stand_side_by_side(world: World) -> None:
    first, split = world.result(), world.result(world.embeddings(experiment="split", split="val"))
    other = world.result(world.embeddings(experiment="other", caption_ids=np.arange(24)))
    different = r"other.json and .*model.json have different queries: \d+ is in the caption_ids of one"
    world.fails(different, first, other)
    world.fails(r"split.json has split 'val', .*model.json has 'test'", first, split)


def test_hardest_negatives_of_the_last_epoch_are_shown(world: World) -> None:
    run = world.embeddings()
    (run.parent / "negatives.csv").write_text("""\
epoch,query,cost,imgid,sentid,negative_imgid,negative_sentid,caption,negative_caption
1,image,9,0,0,1,100,old,old
2,image,0.25,0,0,1,100,NA,a <b>
2,image,0.5,2,200,3,300,harder,c
2,caption,0.125,4,4,77,5,e,f
""")
    section = world.page(world.result(run)).split('<h2 id="negatives">')[1]
    assert "in epoch 2, seed 0" in section
    assert re.findall(r"cost ([\d.]+)", section) == ["0.500", "0.250", "0.125"]
    assert "old" not in section
    for text in ("</span> NA</p>", "a &lt;b&gt;", "image 77"):  # a photo that the data set lacks is a frame
        assert text in section


def test_photos_that_cannot_be_read_are_frames(world: World) -> None:
    result = world.result()
    (world.data.parent / "images" / "3.png").unlink()
    (world.data.parent / "images" / "4.png").write_bytes(b"no photo")
    page = world.page(result, queries=36)
    assert "2 photos could not be read" in page
    assert 'aria-label="caption 0 of 3">no photo<br>3.png</span>' in page
    assert 'alt="caption 0 of 5"' in page
    world.change(lambda content: content.update(pictures=False))
    page = world.page(result)
    assert ("the data set has no photos" in page, "<img" in page) == (True, False)
    assert len(cards(page, "t2i")) >= 4


def test_what_was_moved_is_missed_in_one_line_and_found_when_named(world: World) -> None:
    run = world.embeddings()
    result = world.result(run)
    whole, moved = world.page(result), world.folder / "elsewhere"
    data, embeddings = moved / "data" / "dataset.json", [moved / "run" / "test.h5"]
    moved.mkdir()
    shutil.move(world.data.parent, moved / "data")
    page = world.page(result)
    assert "dataset.json is not where the embeddings record it (give --data)" in page
    assert ('<h2 id="ranks">' in page, "<article" in page) == (True, False)
    shutil.move(run.parent, moved / "run")
    page = world.page(result)
    assert "(give --embeddings)" in page
    assert ('<h2 id="ranks">' in page, 'aria-label="Recalls, all 12 images' in page) == (False, True)
    assert world.page(result, data=data, embeddings=embeddings) == whole


def test_curves_are_those_of_the_result_s_own_run(world: World) -> None:
    run = world.embeddings()
    result = world.result(run)
    (run.parent / "metrics.csv").write_text("epoch,regularization,rsum\n1,0.01,100\n2,0.1,120\n")
    page = world.page(result)
    assert 'aria-label="Validation rsum by regularisation"' in page
    assert 'aria-label="Training loss"' not in page
    (run.parent / "run.json").write_text(json.dumps({"experiment": "another"}))
    assert '<h2 id="training">' not in world.page(result)
    (run.parent / "metrics.csv").unlink()
    (run.parent / "run.json").unlink()
    page = world.page(result)
    assert "no metrics.csv of the run" in page
    assert ('<h2 id="training">' in page, '<h2 id="ranks">' in page) == (False, True)


def test_the_epoch_of_the_highest_rsum_is_marked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Curve] = []
    draw = "vse.eval.report.report.draw_training_curves"
    monkeypatch.setattr(draw, lambda label, x_label, y_label, curves, **options: drawn.extend(curves) or "")
    world.page(world.result())
    assert drawn == [Curve(0, [1, 2, 3], [3.5, 2.5, 2.0], None), Curve(0, [1, 2, 3], [100, 300, 200], 2)]


def test_the_report_says_where_the_loss_changes_and_what_chance_is(world: World) -> None:
    def with_validation(content: dict[str, Any]) -> None:
        for image in content["images"][:4]:
            number = image["imgid"] + 50
            sentences = [{**s, "imgid": number, "sentid": s["sentid"] + 5000} for s in image["sentences"]]
            changes = {"imgid": number, "filename": f"v{number}.png", "split": "val", "sentences": sentences}
            content["images"].append({**image, **changes})

    world.change(with_validation)
    config = {"warmup": {"epochs": 2, "loss": "sum"}, "loss": {"name": "max"}}
    page = world.page(world.result(world.embeddings(provenance=json.dumps({"captions": DATA, "config": config}))))
    assert page.count(">warm-up<") == 2, "in the curves of the loss and of rsum"
    assert page.count(">chance<") == 1
    assert "for 2 epochs, the loss of model is sum (warm-up), then max" in page
    assert "chance, R@1 / 5 / 10 of 8.3 / 38.0 / 67.0 image to text, 8.3 / 41.7 / 83.3 text to image" in page


def test_a_loss_that_never_changes_has_no_line(world: World) -> None:
    for epochs in (0, 3, "2", None):
        note = json.dumps({"config": {"warmup": {"epochs": epochs, "loss": "sum"}}})
        page = world.page(world.result(world.embeddings(provenance=note)), queries=0)
        assert ('aria-label="Training loss' in page, ">warm-up<" in page) == (True, False)


def test_an_ensemble_is_shown_by_the_scores_of_all_its_members_and_the_first_seed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.folder / "experiments").mkdir()
    (world.folder / "experiments" / "both.yaml").write_text("ensemble_of: [vsepp, vse0]")
    monkeypatch.setenv("VSE_PRESETS", str(world.folder))
    named = [(name, seed) for seed in (0, 1) for name in ("vsepp", "vse0")]
    members = [world.embeddings(experiment=name, noise=2.0, seed=seed) for name, seed in named]
    options = AllEvaluateOptions(bootstrap=0, ensemble=True, experiment="both")
    page = world.page(write_result(members, world.folder / "both.json", options=options), queries=36)
    ranks = [int(rank) for card in cards(page, "i2t") for rank in re.findall(r"at rank <b>(\d+)</b>", card)]
    recall = result_of(members[:2], ensemble=True)["protocols"]["full"]["i2t"]["r1"]
    assert len(ranks) == N_IMAGES
    assert 100 * ranks.count(1) / N_IMAGES == pytest.approx(recall)
    assert "<title>tiny both</title>" in page
    assert ", ".join(f"{name} seed {seed}" for name, seed in named) in page
    assert "the result is an ensemble" in page


def test_embeddings_that_changed_are_refused(world: World) -> None:
    result = world.result()
    other = world.embeddings(noise=0.9)
    world.fails(r"test.h5: .*tiny_model.json was computed from other embeddings", result)
    world.fails(r"was computed from other embeddings", result, embeddings=[other])


def test_a_data_set_that_is_not_that_of_the_embeddings_is_refused(world: World) -> None:
    result = world.result()

    def swap(content: dict[str, Any]) -> None:
        seventh, eighth = content["images"][7], content["images"][8]
        seventh["sentences"], eighth["sentences"] = eighth["sentences"], seventh["sentences"]
        for sentence in seventh["sentences"] + eighth["sentences"]:
            sentence["imgid"] = 15 - sentence["imgid"]

    for change, message in (
        (swap, r"/data/dataset.json: has no caption 800 of image 8"),
        (lambda content: content["images"][5]["sentences"].pop(), r"has no caption 501 of image 5"),
        (lambda content: content["images"].pop(4), r"has no image 4"),
        (lambda content: content.update(dataset="another"), r"is the data set 'another', the embeddings belong to 'tiny'"),
    ):
        written = world.data.read_text()
        world.change(change)
        world.fails(message, result)
        world.data.write_text(written)


def test_what_lies_beside_a_folder_that_is_a_link_is_found_as_it_was_written(world: World) -> None:
    (world.folder / "disk" / "far").mkdir(parents=True)
    (world.folder / "results").symlink_to(world.folder / "disk" / "far")
    assert "Not displayed here" not in world.page(world.result())


def test_the_command_prints_its_page_or_fails_in_one_line(world: World, capsys: Printed, fails: Fails) -> None:
    result, none, run = world.result(), world.folder / "none", world.folder / "runs/tiny_model/seed-0"
    out = ("--out", world.folder / "x.html")
    succeeds(report_main, result, *out, "--queries", "3")
    assert capsys.readouterr().out == f"{world.folder / 'x.html'}\n"
    for arguments, reason in (
        ([none], "No such file"),
        ([result, result, result], "one result, or two side by side, not 3"),
        ([result, result, "--embeddings", result], "1 files of embeddings for 2 results"),
        ([result, "--embeddings", none], "none: no such file"),
        ([result, "--data", none], "No such file"),
    ):
        assert reason in fails(report_main, *arguments, *out)
    for name, content, reason in (
        ("metrics.csv", "loss\n3\n", "lacks the column 'epoch'"),
        ("run.json", "{", "not valid JSON"),
    ):
        (run / name).write_text(content)
        assert f"{name}: {reason}" in fails(report_main, result, *out)


def test_a_gallery_has_the_worst_and_the_best_queries_with_links_and_filters(world: World) -> None:
    result = world.result(noise=2.0)
    page = world.page(result, gallery=True, queries=4)
    every = cards(world.page(result, gallery=True), "t2i")
    ranks = [int(re.search(r"right answer at rank <b>(\d+)</b>", card)[1]) for card in every]
    assert len(every) == 2 * N_IMAGES, "all captions, half of them in each group"
    for direction in ("i2t", "t2i"):
        found = [int(re.search(r"right answer at rank <b>(\d+)</b>", card)[1]) for card in cards(page, direction)]
        assert len(found) == 8
        if direction == "t2i":
            assert found == [*sorted(ranks, reverse=True)[:4], *sorted(ranks)[:4]]
        section = page.split(f'<h2 id="{direction}">')[1].split("<h2")[0]
        assert re.findall("<h3>(.*?)</h3>", section) == ["The worst 4 queries", "The best 4 queries"]
        assert sum(map(int, re.findall(r'<span class="quiet">\((\d+)\)</span></label>', section))) == 8
        for card in cards(page, direction):
            (name,) = re.findall(r' id="([a-z]+-\d+)"', card)
            assert f'href="#{name}"' in card
    assert 'class="filters"' not in world.page(result)
    contrast = world.page(result, world.result(experiment="other", noise=3.0), gallery=True)
    assert "A ranks the right answer higher" in contrast
    assert "Right answer at rank (by A)" in contrast


def test_a_report_has_the_hubs_and_the_search_in_two_stages(tmp_path: Path) -> None:
    run = made(n_images=40, n_each=2)
    pairs = replace(run, images=None, captions=None, scores=run.images @ run.captions.T)
    pooled = replace(pairs, pooled_images=run.images, pooled_captions=run.captions)
    options = AllEvaluateOptions(bootstrap=0, rerank=(5,))
    result = write_result([write_embeddings(tmp_path / "test.h5", pooled)], tmp_path / "result.json", options=options)
    hubs = json.loads(result.read_text())["hubness"]["t2i"]
    page = write_report([result], tmp_path / "page.html").read_text()
    assert "<dt>Search in two stages</dt><dd>best 5 re-ranked" in page
    assert f"<dt>Hubs, text to image</dt><dd>skewness {hubs['skewness']:.2f}; {hubs['never']:.1f}%" in page

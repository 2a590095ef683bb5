"""The pages of vse-serve: links to results, further pages, similar images, large images, and what is searched."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flask.testing import FlaskClient
from PIL import Image

from tests.training.conftest import done
from tests.training.serve.conftest import MANY
from tests.training.serve.test_app import TEXT, upload
from vse.cli import data_main
from vse.features.cli import extract_main
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.options import RunInputOptions
from vse.training.serve import page as search_page
from vse.training.serve.answers import ServedRuns
from vse.training.serve.app import create_app
from vse.training.use.model import load_run
from vse.training.use.searcher import encode_items


def read_page(client: FlaskClient, address: str, **options: Any) -> str:
    """The text of a page, without the escapes of HTML."""
    answer = client.get(address, **options)
    assert answer.status_code == 200
    return unescape(answer.get_data(as_text=True))


def list_images(page: str) -> list[int]:
    """The images of the cards of a page, in their order."""
    return [int(image) for image in re.findall(r'class="shot opens" href="/image/(\d+)"', page)]


def test_the_start_page_says_what_is_searched_and_offers_queries(client: FlaskClient) -> None:
    page = read_page(client, "/")
    assert "Searches 12 of the 66 images of demo (split test)" in page
    examples = re.findall(r'<a href="(/\?q=[^"]+)">([^<]+)</a>', page)
    assert 1 <= len(examples) <= 4
    for address, text in examples:
        assert f"Images for “{text}”" in read_page(client, address)
    assert "Example queries" not in read_page(client, "/?q=a")


@pytest.mark.parametrize("number", [0, 1], ids=["vectors", "pairs"])
def test_further_pages_continue_the_results(client: FlaskClient, number: int) -> None:
    every = client.get(f"/search?as=json&q={TEXT}&k=12").get_json()["runs"][number]["hits"]
    address, hits = f"/?q={TEXT}&k=5", []
    for page in (1, 2, 3):
        hits += client.get(f"/search?as=json&q={TEXT}&k=5&page={page}").get_json()["runs"][number]["hits"]
        content = read_page(client, address)
        found = re.search(r'rel="next" href="([^"]+)"', content)
        assert ('rel="prev"' in content, found is None) == (page > 1, page == 3)
        address = found[1] if found else ""
    assert hits == every


def test_an_image_finds_similar_images_by_its_vectors(client: FlaskClient, vectors_run: Path, photo: Path) -> None:
    trained = load_run(vectors_run, "test", device="cpu")
    vectors = encode_items(trained, by_photo=False).vectors.numpy()
    ids = trained.split.pairs.image_ids
    expected = [int(image) for image in ids[np.argsort(-vectors @ vectors[3], kind="stable")]]
    assert expected[0] == ids[3]
    hits = client.get(f"/search?as=json&like={ids[3]}&k=12").get_json()["runs"][0]["hits"]
    assert [hit["image"] for hit in hits] == expected[1:], "the image itself is not among them"
    page = read_page(client, f"/?like={ids[3]}")
    assert f"Images like {photo.name}" in page
    assert int(ids[3]) not in list_images(page)
    found = client.post("/search?as=json&find=images&k=12", data=upload(photo.read_bytes())).get_json()["runs"]
    for run in found:
        assert run["hits"][0]["image"] == ids[3], "a photograph finds itself"
    assert [hit["image"] for hit in found[0]["hits"]] == expected
    assert client.get("/?like=0").status_code == 404


def test_the_results_of_a_photograph_have_an_address(client: FlaskClient, photo: Path) -> None:
    answer = client.post("/search", data={**upload(photo.read_bytes()), "find": "images"})
    assert answer.status_code == 303
    assert re.fullmatch(r"/\?photo=[0-9a-f]{32}&find=images", answer.location)
    first, again = read_page(client, answer.location), read_page(client, answer.location)
    assert list_images(first) == list_images(again)
    assert "Images like your photograph" in first
    captions = re.search(r'<a href="([^"]+)">Captions</a>', first)
    assert captions
    assert "Captions for your photograph" in read_page(client, captions[1])
    gone = client.get("/?photo=" + "0" * 32)
    assert gone.status_code == 400
    assert "no longer in the memory" in gone.get_data(as_text=True)


def test_the_memory_of_photographs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_page, "_MAX_KEPT_BYTES", 10)
    kept = search_page.UploadedPhotos()
    keys = [kept.keep(bytes([number]) * 4) for number in range(3)]
    assert [kept.find(key)[0] for key in keys[1:]] == [1, 2]
    with pytest.raises(search_page.UserError, match="no longer in the memory"):
        kept.find(keys[0])
    large = kept.keep(bytes(50))
    assert kept.find(large) == bytes(50)
    assert search_page.UploadedPhotos().keep(bytes(50)) != large, "the key cannot be computed from the photograph"


@pytest.mark.parametrize("kind", ["GIF", "BMP", "PNG", "WEBP"])
def test_photographs_of_other_formats_are_read(client: FlaskClient, encoded: Callable[..., bytes], kind: str) -> None:
    content = encoded(Image.new("RGB", (40, 30), "red"), kind)
    answer = client.post("/search?as=json", data=upload(content)).get_json()
    assert answer["photo"] == {"width": 40, "height": 30}
    cut = client.post("/search?as=json", data=upload(content[: len(content) // 2]))
    assert cut.status_code == 400
    assert "not a readable image" in cut.get_json()["error"]


def test_an_image_has_a_page_with_all_captions_and_its_file(client: FlaskClient, demo: Path) -> None:
    dataset = load_dataset_file(demo)
    image = dataset.split("test")[0]
    for address in (f"/image/{image.imgid}", f"/image/{image.imgid}?as=part"):
        page = read_page(client, address)
        assert all(f"<li>{caption.raw}</li>" in page for caption in image.captions)
        assert f"/?like={image.imgid}" in page
    large = client.get(f"/photo/{image.imgid}/large")
    with Image.open(dataset.image_path(image)) as original:
        assert Image.open(io.BytesIO(large.data)).size == original.size
    file = client.get(f"/photo/{image.imgid}/file")
    assert file.data == dataset.image_path(image).read_bytes()
    assert file.headers["Content-Disposition"] == f"attachment; filename={image.file}"
    hidden = dataset.split("train")[0].imgid
    assert [client.get(f"/{path}").status_code for path in (f"image/{hidden}", f"photo/{hidden}/file")] == [404, 404]


def test_a_long_query_is_shortened_in_the_heading(client: FlaskClient) -> None:
    query = "a red square " * 40
    page = read_page(client, "/", query_string={"q": query})
    heading = re.search(r"<h2[^>]*>(.*?)</h2>", page)
    assert heading
    assert len(heading[1]) < 100
    assert heading[1].endswith("…”")
    assert f'value="{query.strip()}"' in page, "the search field has all of it"


@pytest.mark.parametrize(
    ("split", "n_images", "description"),
    [
        ("train,val", 54, "54 of the 66 images of demo (splits train and val)"),
        ("all", 66, "all 66 images of demo (all splits)"),
    ],
)
def test_several_splits_are_searched(vectors_run: Path, split: str, n_images: int, description: str) -> None:
    served = ServedRuns([vectors_run], split, [RunInputOptions()], MANY, "cpu")
    client = create_app(served).test_client()
    answer = client.get("/search?as=json&q=a+red+square&k=100").get_json()
    assert answer["images"] == {"searched": n_images, "all": 66}
    assert len(answer["runs"][0]["hits"]) == n_images
    assert f"Searches {description}" in read_page(client, "/")


def test_an_album_without_captions_takes_photographs(demo: Path, vectors_run: Path, cache: Path, tmp_path: Path) -> None:
    done(data_main, "album", demo.parent / "images", "--out", tmp_path / "album")
    done(extract_main, "cnn", "--dataset", tmp_path / "album" / "dataset.json", "--like", cache, "--out", tmp_path / "a.h5")
    served = ServedRuns([vectors_run], "all", [RunInputOptions(features=tmp_path / "a.h5")], MANY, "cpu")
    client = create_app(served).test_client()
    photo = next((tmp_path / "album" / "images").iterdir())
    page = unescape(client.post("/search", data=upload(photo.read_bytes()), follow_redirects=True).get_data(as_text=True))
    assert "Images like your photograph" in page
    assert list_images(page)
    assert ">Captions<" not in page
    start = read_page(client, "/")
    captions = {caption.raw for image in load_dataset_file(demo).images for caption in image.captions}
    examples = re.findall(r'<a href="/\?q=[^"]+">([^<]+)</a>', start)
    assert examples, "captions of the data that the run was trained on"
    assert set(examples) <= captions


def test_the_queue_of_requests_is_not_reported() -> None:
    assert not logging.getLogger("waitress.queue").isEnabledFor(logging.WARNING)

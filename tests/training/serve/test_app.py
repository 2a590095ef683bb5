from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flask.testing import FlaskClient
from PIL import Image

from tests.drawn import drawings
from tests.training.conftest import Patch
from tests.training.use.attending import compare
from vse.pipeline.dataset.captions import ascii_words
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.serve.answers import ServedRuns
from vse.training.serve.page import MAX_RESULTS, MAX_TEXT_LENGTH
from vse.training.use.search import RunSearchOptions, search_run

TEXT = "a red square above a blue circle"


def upload(content: bytes, name: str = "photo.jpg") -> dict[str, Any]:
    """The form of an uploaded file."""
    return {"photo": (io.BytesIO(content), name)}


def test_a_caption_finds_with_each_run_what_vse_search_finds(client: FlaskClient, vectors_run: Path, sets_run: Path) -> None:
    found = client.get("/search", query_string={"q": TEXT, "as": "json", "k": 4}).get_json()
    assert (found["query"], found["dataset"], found["split"]) == (TEXT, "demo", "test")
    for run, folder in zip(found["runs"], (vectors_run, sets_run), strict=True):
        expected = search_run(folder, TEXT, RunSearchOptions(k=4), device="cpu")
        assert [hit["rank"] for hit in run["hits"]] == [1, 2, 3, 4]
        assert [hit["image"] for hit in run["hits"]] == [hit.image_id for hit in expected]
        assert [tuple(hit["captions"]) for hit in run["hits"]] == [hit.captions for hit in expected]
        np.testing.assert_allclose([hit["score"] for hit in run["hits"]], [hit.score for hit in expected], atol=1e-5)
        assert (run["searched"], run["error"]) == (12, "")
    assert [run["scored"] for run in found["runs"]] == [None, 12]


def test_a_photograph_finds_what_vse_search_finds(client: FlaskClient, photo: Path, vectors_run: Path, sets_run: Path) -> None:
    found = client.post("/search?as=json&k=4", data=upload(photo.read_bytes())).get_json()
    with Image.open(photo) as image:
        assert found["photo"] == {"width": image.width, "height": image.height}
    for run, folder in zip(found["runs"], (vectors_run, sets_run), strict=True):
        expected = search_run(folder, photo, RunSearchOptions(k=4), device="cpu")
        assert [hit["caption"] for hit in run["hits"]] == [hit.caption_id for hit in expected]
        assert [hit["captions"] for hit in run["hits"]] == [[hit.caption] for hit in expected]
        np.testing.assert_allclose([hit["score"] for hit in run["hits"]], [hit.score for hit in expected], atol=1e-5)


def test_the_page_shows_the_runs_side_by_side(client: FlaskClient) -> None:
    query = {"q": TEXT, "k": 12}
    found = client.get("/search", query_string={**query, "as": "json"}).get_json()
    page = client.get("/search", query_string=query).get_data(as_text=True)
    sections = page.split("<section")[1:]
    assert len(sections) == 2
    for section, run in zip(sections, found["runs"], strict=True):
        cards = section.split('<li class="card">')[1:]
        for card, hit in zip(cards, run["hits"], strict=True):
            assert f"<strong>{hit['rank']}</strong>" in card
            assert f"{hit['score']:.4f}".replace("-", "−") in card
            assert f'src="/photo/{hit["image"]}"' in card
            assert hit["captions"][0] in card
    ranks = {hit["image"]: hit["rank"] for hit in found["runs"][1]["hits"]}
    first = found["runs"][0]["hits"][0]["image"]
    assert f"rank {ranks[first]} by {found['runs'][1]['name']}" in sections[0].replace("&#34;", '"')


def test_unknown_words_are_named_and_a_query_without_words_is_a_line_in_each_column(client: FlaskClient) -> None:
    runs = client.get("/search", query_string={"q": "a Zebra", "as": "json"}).get_json()["runs"]
    assert [run["remark"] for run in runs] == ["not a word of the training captions: zebra"] * 2
    assert "Not a word of the training captions: zebra." in client.get("/search?q=a+zebra").get_data(as_text=True)
    for query, line in (
        ("?!", "no word to search for"),
        ("zebra \u00fcber", "none of its words is a word of the training captions"),
    ):
        page = client.get("/", query_string={"q": query}).get_data(as_text=True)
        assert page.count(line) == 2
        assert '<li class="card">' not in page


def test_where_a_run_looked_is_what_its_model_attends_to(client: FlaskClient, sets_run: Path) -> None:
    found = client.get("/search", query_string={"q": TEXT, "as": "json"}).get_json()["runs"]
    image = found[1]["hits"][0]["image"]
    query = {"q": TEXT, "run": 1, "hit": image}
    for form in ("part", "page"):
        (shown,) = drawings(client.get("/search", query_string={**query, "as": form}).get_data(as_text=True)).values()
        assert shown.source == f"/photo/{image}/large"
        compare(shown, sets_run, image, ascii_words(TEXT))
    seen = client.get("/search", query_string={**query, "as": "json"}).get_json()
    assert seen["side"] == "t2i"
    assert seen["score"] == pytest.approx(found[1]["hits"][0]["score"], abs=1e-4)
    assert np.shape(seen["weights"]) == (len(seen["boxes"]), len(seen["words"]))
    np.testing.assert_allclose(np.sum(seen["weights"], 0), 1, atol=1e-5)


def test_where_a_run_looked_in_a_photograph_if_it_attends(client: FlaskClient, photo: Path, served: ServedRuns) -> None:
    run = client.post("/search?as=json", data=upload(photo.read_bytes())).get_json()["runs"][1]
    caption = run["hits"][0]["caption"]
    address = client.post("/search", data=upload(photo.read_bytes())).location
    part = client.get(f"{address}&as=part&run=1&hit={caption}").get_data(as_text=True)
    (shown,) = drawings(part).values()
    assert shown.source.startswith("data:image/jpeg;base64,")
    words = [label.split(" ")[0] for label in shown.words.values()]
    assert words[1:-1] == ascii_words(run["hits"][0]["captions"][0])
    refused = client.get("/search?as=json&q=a&run=0&hit=54")
    assert refused.status_code in (400, 404)
    image = int(served.runs[0].searcher.trained.split.pairs.image_ids[0])
    answer = client.get(f"/search?as=json&q=a&run=0&hit={image}")
    assert answer.status_code == 400
    assert answer.get_json()["error"] == f"{served.runs[0].name} cannot show where it looked"


def test_photos_of_the_split_are_served_by_their_ids_as_small_jpegs(client: FlaskClient, demo: Path) -> None:
    dataset = load_dataset_file(demo)
    for image in dataset.split("test")[:2]:
        answer = client.get(f"/photo/{image.imgid}")
        assert answer.mimetype == "image/jpeg"
        shown = np.asarray(Image.open(io.BytesIO(answer.data)), int)
        assert np.abs(shown - np.asarray(Image.open(dataset.image_path(image)), int)).mean() < 8
    image = load_dataset_file(demo).split("train")[0]
    assert client.get(f"/photo/{image.imgid}").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        *("/photo/", "/photo/999999", "/photo/-1", "/photo/1.0", "/photo/1e3", "/photo/abc", "/photo/" + "9" * 400),
        *("/photo/../dataset.json", "/photo/..%2f..%2fdataset.json", "/photo/%2e%2e/1", "/photo/60%00.jpg", "/photo/60/.."),
        *("/photo/0/file", "/photo/0/large", "/image/0", "/image/999999", "/photo/54/other"),
        *("/photo", "/images", "/static/page.js", "/../page.js", "/page.js/", "/dataset.json", "/.."),
    ],
)
def test_paths_and_bad_ids_lead_nowhere(client: FlaskClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (404, 308)
    assert b"imgid" not in answer.data


@pytest.mark.parametrize("path", ["/", "/search", "/photo/60", "/page.js"])
def test_only_questions_are_answered_and_only_a_search_is_posted_to(client: FlaskClient, path: str) -> None:
    for method in ("put", "delete", "patch", "options", "trace", *([] if path == "/search" else ["post"])):
        assert client.open(path, method=method).status_code == 405, method


@pytest.mark.parametrize(
    ("query", "line"),
    [
        ("", "Type a caption, or choose a photograph."), ("q=%20%20", "Type a caption, or choose a photograph."),
        ("q=" + "a" * (MAX_TEXT_LENGTH + 1), f"The caption has more than {MAX_TEXT_LENGTH} characters."),
        ("q=a&k=0", f"k must be a number from 1 to {MAX_RESULTS}"),
        (f"q=a&k={MAX_RESULTS + 1}", f"k must be a number from 1 to {MAX_RESULTS}"), ("q=a&k=many", "k must be a number"),
        ("q=a&run=0", "hit must be a number"), ("q=a&run=-1&hit=3", "run must be a number"),
        ("q=a&run=7&hit=3", "there is no run 7"), ("q=a&run=1&hit=9999", "the split 'test' has no image 9999"),
        (f"q=a&run=1&hit={2**64}", "hit must be a number"),
    ],
)  # fmt: skip
def test_a_wrong_query_is_one_line(client: FlaskClient, query: str, line: str) -> None:
    for form in ("page", "part", "json"):
        answer = client.get(f"/search?{query}&as={form}")
        assert answer.status_code in (400, 404)
        text = answer.get_json()["error"] if form == "json" else answer.get_data(as_text=True).replace("&#39;", "'")
        assert line in text
        if form != "json":
            assert text.count('role="alert"') == 1


def png_bomb(side: int) -> bytes:
    """A PNG whose header promises side x side pixels, and whose data are few."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "Choose a photograph first."),
        (b"no image at all", "the photograph: not a readable image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", "not a readable image"),
        (b"GIF89a" + bytes(100), "not a readable image"),
        (png_bomb(9_200), "9200 x 9200 pixels are too many"),
        (png_bomb(30_000), "could be decompression bomb"),
        (png_bomb(100), "not a readable image"),
    ],
    ids=["nothing", "text", "svg", "gif", "bomb", "larger bomb", "cut"],
)
def test_what_is_no_photograph_is_one_line(client: FlaskClient, content: bytes, line: str) -> None:
    for form in ("json", "page"):
        answer = client.post(f"/search?as={form}", data=upload(content, "../../etc/passwd"), follow_redirects=True)
        text = answer.get_json()["error"] if form == "json" else answer.get_data(as_text=True)
        assert answer.status_code == 400
        assert line in text
        assert "passwd" not in text
        assert " at 0x" not in text


def test_forms_without_a_photo_or_too_large_are_refused(client: FlaskClient, encoded: Callable[..., bytes]) -> None:
    for data in ({}, {"photo": "a text"}, {"other": (io.BytesIO(b"x"), "x.jpg")}):
        answer = client.post("/search?as=json", data=data, content_type="multipart/form-data")
        assert answer.status_code == 400
        assert answer.get_json()["error"] == "Choose a photograph first."
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)
    content = encoded(Image.fromarray(noise), "PNG")
    assert len(content) > 100_000
    answer = client.post("/search?as=json", data=upload(content))
    assert answer.status_code == 413
    assert re.fullmatch(r"The photograph has more than 0\.09\d* MB\.", answer.get_json()["error"])
    answer = client.post("/search?as=json", data={f"x{k}": (io.BytesIO(b"x"), "x") for k in range(50)})
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/", "/?q=a", "/search?q=a", "/photo/54", "/photo/54/file", "/image/54", "/page.js"])
def test_another_host_name_is_refused_and_those_of_this_machine_are_not(client: FlaskClient, path: str) -> None:
    hosts = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost@evil", "10.0.0.1", ""]
    for answer in (client.get(path, headers={"Host": host}) for host in hosts):
        assert (answer.status_code, answer.mimetype) == (400, "text/html")
        assert b'<li class="card">' not in answer.data
    for host in ("127.0.0.1", "127.0.0.1:8000", "localhost:1234", "[::1]:8000"):
        assert client.get(path, headers={"Host": host}).status_code == 200, host


@pytest.mark.parametrize("path", ["/", "/search?q=a", "/search?as=json&q=a", "/photo/999", "/nowhere", "/page.js"])
def test_every_answer_forbids_what_it_does_not_need(client: FlaskClient, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert "http" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers
    assert "Set-Cookie" not in headers


def test_what_is_typed_comes_back_escaped(client: FlaskClient) -> None:
    evil = '"><script>alert(1)</script>'
    for form in ("page", "part"):
        assert "<script>alert" not in client.get("/search", query_string={"q": f"a {evil}", "as": form}).get_data(as_text=True)
    assert "<script>alert" not in client.get("/search", query_string={"q": evil, "k": "x"}).get_data(as_text=True)


def test_a_failure_is_one_line_without_a_traceback(client: FlaskClient, served: ServedRuns, monkeypatch: Patch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret path")

    monkeypatch.setattr(served, "answer_query", broken)
    answer = client.get("/search?q=a&as=json")
    assert answer.status_code == 500
    assert answer.get_json() == {"error": "That did not work; the terminal of vse-serve may say why."}

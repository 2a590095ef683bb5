from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from io import BytesIO
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from PIL import Image

from tests.training.conftest import Log, experiment
from tests.training.serve.conftest import MANY
from tests.training.serve.test_app import png_bomb, upload
from vse.pipeline.files.images import BadImage, decode_image
from vse.training.options import RunInputOptions
from vse.training.serve.answers import ServedRuns, UnknownId
from vse.training.serve.page import LARGE_PHOTO_LOCK, LARGE_PHOTO_PIXELS, read_upload
from vse.training.training import train


def test_runs_of_one_name_are_known_by_their_folders(served: ServedRuns, vectors_run: Path, sets_run: Path) -> None:
    assert [run.name for run in served.runs] == [f"vsepp, seed 0 ({run})" for run in (vectors_run, sets_run)]
    assert [run.has_attention for run in served.runs] == [False, True]
    assert served.n_images == 12


def test_a_query_reads_no_file_of_a_run_or_of_the_data_set(own_cache: Path, tmp_path: Path) -> None:
    run = train(own_cache, experiment("train.epochs=1"), out=tmp_path / "run")
    served = ServedRuns([run], "test", [RunInputOptions()], MANY, "cpu")
    before = served.answer_query("a red square", 3)[0]
    images = own_cache.parent.parent / "data" / "images"
    photo = decode_image(next(images.iterdir()))
    captions = served.answer_query(photo, 3)[0]
    image = served.dataset.split("test")[0]
    served.dataset.image_path(image).write_bytes(b"spoilt")
    for number in (image.imgid, -5):
        with pytest.raises(UnknownId):
            served.read_small_photo(number)
    for folder in (run, own_cache.parent, images.parent):
        shutil.rmtree(folder)
    assert served.answer_query("a red square", 3)[0].hits == before.hits
    assert served.answer_query(photo, 3)[0].hits == captions.hits


def test_imported_features_read_texts_alone(regions: Path, tmp_path: Path, caplog: Log) -> None:
    run = train(regions, experiment("train.epochs=1", "model.similarity={name: scan}", *WORDS), out=tmp_path / "run")
    served = ServedRuns([run], "test", [RunInputOptions()], MANY, "cpu")
    assert "reads no photos" in caplog.text
    assert not served.reads_photos
    assert len(served.answer_query("a red square", 3)[0].hits) == 3
    (answer,) = served.answer_query(Image.new("RGB", (32, 32)), 3)
    assert answer.error == "It reads no photos here; the terminal of vse-serve says why."


WORDS = ["model.caption_encoder={name: gru, states: all, bidirectional: true}"]


def test_too_many_pixels_are_refused_from_the_header_alone(client: FlaskClient) -> None:
    with pytest.raises(BadImage, match="the photograph: 5001 x 5001 pixels .*25,000,000"):
        read_upload(png_bomb(5001), 25_000_000)
    stream = BytesIO()
    Image.new("L", (6000, 5000)).save(stream, "JPEG", quality=1)
    content = stream.getvalue()[:90_000]  # its header is enough
    answer = client.post("/search?as=json", data=upload(content))
    assert answer.status_code == 400
    assert "6000 x 5000 pixels are too many" in answer.get_json()["error"]


@pytest.mark.parametrize("size", [(300, 200), (3400, 3000)], ids=["small", "large"])
def test_a_photograph_is_read_as_everywhere(encoded: Callable[..., bytes], size: tuple[int, int]) -> None:
    image = Image.linear_gradient("L").convert("RGB").resize(size, Image.Resampling.NEAREST)
    assert read_upload(encoded(image, "PNG", compress_level=1), 25_000_000).tobytes() == image.tobytes()


def test_large_photographs_are_decoded_one_at_a_time(client: FlaskClient, encoded: Callable[..., bytes]) -> None:
    large, small = (encoded(Image.new("RGB", size), "PNG") for size in ((3400, 3000), (40, 30)))
    assert LARGE_PHOTO_PIXELS < 3400 * 3000

    def search(content: bytes) -> tuple[int, dict[str, object]]:
        answer = client.application.test_client().post("/search?as=json", data=upload(content))
        return answer.status_code, answer.get_json()

    with ThreadPoolExecutor(3) as pool:
        with LARGE_PHOTO_LOCK:
            searches = [pool.submit(search, large) for _ in range(3)]
            (refused,), others = wait(searches, return_when=FIRST_COMPLETED)
            line = "The server reads other large photographs; try again in a moment."
            assert refused.result() == (503, {"error": line})
            assert search(small)[0] == 200, "small ones do not wait"
        assert [one.result()[0] for one in others] == [200, 200]

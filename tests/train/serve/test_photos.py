"""Decoding of photographs from strangers: their pixels are counted first, and large ones are decoded one at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from io import BytesIO

import pytest
from flask.testing import FlaskClient
from PIL import Image

from tests.train.serve.test_app import png_bomb, upload
from vse.pipeline.files.images import BadImage
from vse.train.serve.answers import DECODING, LARGE, read_upload


def test_too_many_pixels_are_refused_from_the_header_alone() -> None:
    with pytest.raises(BadImage, match="the photograph: 5001 x 5001 pixels .*25,000,000"):
        read_upload(png_bomb(5001), 25_000_000)


@pytest.mark.parametrize("size", [(300, 200), (3400, 3000)], ids=["small", "large"])
def test_a_photograph_is_read_as_everywhere(encoded: Callable[..., bytes], size: tuple[int, int]) -> None:
    image = Image.linear_gradient("L").convert("RGB").resize(size, Image.Resampling.NEAREST)
    assert read_upload(encoded(image, "PNG", compress_level=1), 25_000_000).tobytes() == image.tobytes()


def test_of_large_photographs_one_is_decoded_one_waits_and_the_others_are_refused(
    client: FlaskClient, encoded: Callable[..., bytes]
) -> None:
    large, small = (encoded(Image.new("RGB", size), "PNG") for size in ((3400, 3000), (40, 30)))
    assert LARGE < 3400 * 3000

    def search(content: bytes) -> tuple[int, dict[str, object]]:
        answer = client.application.test_client().post("/search?as=json", data=upload(content))
        return answer.status_code, answer.get_json()

    with ThreadPoolExecutor(3) as pool:
        with DECODING:
            searches = [pool.submit(search, large) for _ in range(3)]
            (refused,), others = wait(searches, return_when=FIRST_COMPLETED)
            line = "The server reads other large photographs; try again in a moment."
            assert refused.result() == (503, {"error": line})
            assert search(small)[0] == 200, "small ones do not wait"
        assert [one.result()[0] for one in others] == [200, 200]


def test_a_large_jpeg_of_too_many_pixels_is_one_line(client: FlaskClient) -> None:
    stream = BytesIO()
    Image.new("L", (6000, 5000)).save(stream, "JPEG", quality=1)
    content = stream.getvalue()[:90_000]  # its header is enough
    answer = client.post("/search?as=json", data=upload(content))
    assert answer.status_code == 400
    assert "6000 x 5000 pixels are too many" in answer.get_json()["error"]

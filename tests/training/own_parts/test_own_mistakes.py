"""Typical mistakes in a user's own loss, similarity or extractor: each is one clear line, before anything is trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import succeeds
from tests.training.conftest import COMMAND, Capture, Fails, Patch
from vse.cli import main as vse_main
from vse.features.cli import extract_main
from vse.training.cli import train_main
from vse.training.losses import LOSSES
from vse.training.models.encoders import CAPTION_ENCODERS, IMAGE_ENCODERS
from vse.training.models.similarities import SIMILARITIES
from vse.training.own_parts.check import check_encoder, check_loss, check_similarity

LOSS = """
import torch

def mine(scores, positives, negatives, margin):
    right = scores.gather(1, positives[:, None])
    costs = (margin - right + scores).clamp(min=0) * negatives
    return costs.sum()
"""
LOSS_MISTAKES = {
    "a number": ("return costs.sum()", "return costs.sum().item()", r"returns float, not a tensor"),
    "no result": ("return costs.sum()", "costs.sum()", r"returns NoneType, not a tensor"),
    "one cost per query": ("return costs.sum()", "return costs.sum(1)", r"shape \(4,\), not one number"),
    "not finite": ("return costs.sum()", "return (costs - 1).log().sum()", r"its cost of four pairs is nan"),
    "detached": ("right = scores", "scores = scores.detach(); right = scores", r"has no gradient"),
    "NumPy": ("return costs", "return torch.tensor(costs.detach().numpy())", r"has no gradient"),
    "constant": ("return costs.sum()", "return (costs * 0).sum()", r"does not change with the scores"),
    "wrong sign": ("return costs.sum()", "return -costs.sum()", r"a higher score of the positives costs more"),
    "changed scores": ("right = scores", "scores[~negatives] = 0; right = scores", r"changes its argument scores in place"),
    "wrong shape": ("positives[:, None]", "positives", r"own\.py:5: mine fails at `right = .*` \(RuntimeError"),
    "too few arguments": (
        "positives, negatives, margin",
        "margin",
        r"own\.py:4: a loss function takes scores, positives, neg",
    ),
    "unknown name": ("costs.sum()", "cost.sum()", r"own\.py:7: mine fails at `return cost\.sum\(\)` \(NameError"),
    "gradient not finite": ("return costs.sum()", "return costs.sqrt().sum()", r"its gradient is not finite"),
}

SIMILARITY = """
import torch
from vse.training.kinds import InputKind
from vse.training.models.similarities.base import Similarity, SimilaritySettings

class Mine(SimilaritySettings):
    def build(self, dim):
        return Network(dim)

class Network(Similarity):
    def __init__(self, dim):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, images, captions):
        (image,), (caption,) = images, captions
        scores = image @ caption.T
        return scores
"""
SETS_OF_REGIONS = """
    image_kind = InputKind.SETS
    def build(self, dim):
        return Regions()

class Regions(Similarity):
    def forward(self, images, captions):
        (regions, mask), (caption,) = images, captions
        return torch.einsum("nrd,md->nmr", regions, caption).amax(2)
"""
SIMILARITY_MISTAKES = {
    "transposed": ("return scores", "return scores.T", r"its matrix \(7, 5\) is transposed"),
    "pairs only": ("return scores", "return scores.diag()", r"scores of shape \(5,\) for 5 images and 7 captions"),
    "centred": ("return scores", "return scores - scores.mean()", r"changes with the other images and captions"),
    "softmax over captions": ("return scores", "return scores.softmax(1)", r"changes with the other images and captions"),
    "detached": ("image @", "image.detach() @", r"the image embeddings get no gradient"),
    "no gradient": ("return scores", "return scores.detach()", r"its scores have no gradient"),
    "not finite": ("return scores", "return scores.log()", r"a score is not finite"),
    "a list": ("return scores", "return [scores]", r"returns list, not one tensor or a tuple of two"),
    "no tuple": ("(image,), (caption,)", "image, caption", r"own\.py:17: forward fails at `scores = .*` \(AttributeError"),
    "chance": ("return scores", "return scores + torch.rand(5, 7)[: len(scores), : scores.shape[1]]", r"two calls give diff"),
    "no network": ("return Network(dim)", "return None", r"build returns NoneType, not a torch module"),
    "build is missing": ("def build(", "def make(", r"Mine does not fit \(NotImplementedError"),
    "the network alone": ("class Mine(SimilaritySettings)", "class Mine(Similarity)", r"derives from none of .*Settings"),
    "padding counts": ("\n    def build(self, dim):\n        return Network(dim)\n", SETS_OF_REGIONS, r"depends on padding"),
}

EXTRACTOR = """
import numpy as np
from vse.features.extractors.images import ImageExtractor, ImageVectors
from vse.features.settings.base import ImageSettings

class Mine(ImageSettings):
    def build_extractor(self, arguments):
        return Means(self)

class Means(ImageExtractor):
    batch_size = 3

    def __init__(self, config):
        self.config = config

    def prepare(self, image, image_id):
        return np.asarray(image, np.float32)

    def compute_vectors(self, batch):
        vectors = [pixels.mean((0, 1)) for pixels in batch]
        return [ImageVectors(vector) for vector in vectors]
"""
EXTRACTOR_MISTAKES = {
    "arrays": ("return [ImageVectors(vector) for vector in vectors]", "return vectors", r"Mine does not fit \("),
    "lists": ("ImageVectors(vector)", "ImageVectors(vector.tolist())", r"compute_vectors|Mine does not fit"),
    "no result": ("return [ImageVectors", "[ImageVectors", r"Mine does not fit \(TypeError"),
    "one too few": ("in vectors]", "in vectors[1:]]", r"compute_vectors returns 2 results for 3 images"),
    "other lengths": ("pixels.mean((0, 1))", "pixels.mean((0, 2))", r"Mine does not fit \(ValueError"),
    "several vectors": ("pixels.mean((0, 1))", "pixels[:4, 0]", r"returns several vectors for each image, and row_kind"),
    "not finite": ("pixels.mean((0, 1))", "pixels.mean((0, 1)) * np.inf", r"a number is not finite as float16"),
    "the batch counts": ("for vector in vectors]", "for vector in vectors - np.mean(vectors, 0)]", r"change with the batch"),
    "chance": ("pixels.mean((0, 1))", "np.random.random(8)", r"change with the batch, or from call to call"),
    "fails": ("np.asarray(image, np.float32)", "image.tobitmap()", r"own\.py:17: prepare fails at `.*photograph-0\.png"),
    "build is missing": ("def build_extractor(", "def build(", r"Mine does not fit \(AttributeError"),
    "no network": ("return Means(self)", "return None", r"build_extractor returns NoneType, not an Extractor"),
    "the extractor alone": ("class Mine(ImageSettings)", "class Mine(ImageExtractor)", r"derives from none of .*Settings"),
}
MISTAKES = [
    pytest.param(text, name, *mistake, id=f"{kind}: {label}")
    for kind, text, name, mistakes in (
        ("loss", LOSS, "mine", LOSS_MISTAKES),
        ("similarity", SIMILARITY, "Mine", SIMILARITY_MISTAKES),
        ("extractor", EXTRACTOR, "Mine", EXTRACTOR_MISTAKES),
    )
    for label, mistake in mistakes.items()
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The working folder, in which the user's file lies."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize(("text", "name"), [(LOSS, "mine"), (SIMILARITY, "Mine"), (EXTRACTOR, "Mine")])
def test_a_sound_part_passes(text: str, name: str, folder: Path, capsys: Capture) -> None:
    (folder / "own.py").write_text(text)
    succeeds(vse_main, "check", f"own.py:{name}")
    assert "is sound" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_of_the_package_is_sound(name: str) -> None:
    for same_image in ("keep", "mask", *(["positive"] if LOSSES[name].allows_several_positives else [])):
        loss = LOSSES.parse({"name": name, "same_image": same_image})
        for n_more_negatives in (0, 3):
            check_loss(loss, n_more_negatives)


@pytest.mark.parametrize("name", list(SIMILARITIES))
def test_a_similarity_of_the_package_is_sound(name: str) -> None:
    check_similarity(SIMILARITIES.parse(name))


@pytest.mark.parametrize("name", sorted({*IMAGE_ENCODERS, *CAPTION_ENCODERS}))
def test_an_encoder_of_the_package_is_sound(name: str) -> None:
    check_encoder((IMAGE_ENCODERS if name in IMAGE_ENCODERS else CAPTION_ENCODERS).parse(name))


@pytest.mark.parametrize(("text", "name", "right", "wrong", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_the_expected_form(
    text: str, name: str, right: str, wrong: str, message: str, folder: Path, fails: Fails
) -> None:
    assert right in text
    (folder / "own.py").write_text(text.replace(right, wrong))
    refusal = fails(vse_main, "check", f"own.py:{name}")
    assert re.search(message, refusal), refusal
    assert "own.py" in refusal
    assert "Traceback" not in refusal


def test_a_training_with_a_mistake_stops_before_it_writes(cache: Path, folder: Path, fails: Fails) -> None:
    (folder / "own.py").write_text(LOSS.replace("costs.sum()", "costs.sum(1)"))
    refusal = fails(train_main, "--features", cache, "--out", "run", *COMMAND, "--set", "loss=own.py:mine")
    assert "not one number; end with .sum()" in refusal
    assert not (folder / "run").exists()


def test_an_error_in_the_middle_of_a_training_names_the_users_line(cache: Path, folder: Path, fails: Fails) -> None:
    """The part is sound on the small batch of the check, and fails on a batch of 32 pairs."""
    (folder / "own.py").write_text(LOSS.replace("return costs.sum()", "return check(costs).sum()") + HELPER)
    refusal = fails(train_main, "--features", cache, "--out", "run", *COMMAND, "--set", "loss=own.py:mine")
    assert "own.py:11: check fails at `raise RuntimeError(" in refusal
    assert "called in mine at own.py:7" in refusal
    assert "vse/training" not in refusal


HELPER = """
def check(costs):
    if len(costs) > 16:
        raise RuntimeError(f"{len(costs)} queries are too many")
    return costs
"""


def test_scores_of_captions_that_same_image_excludes_must_not_count(folder: Path, fails: Fails) -> None:
    (folder / "own.py").write_text(LOSS.replace(" * negatives", ""))
    succeeds(vse_main, "check", "own.py:mine")  # with same_image: keep, every other caption is a negative
    refusal = fails(vse_main, "check", "own.py:mine", "--set", "same_image=mask")
    assert "counts the score of a caption of the same image" in refusal


def test_a_mean_over_queries_and_a_distance_are_warnings(folder: Path, capsys: Capture) -> None:
    (folder / "mean.py").write_text(LOSS.replace("costs.sum()", "costs.sum(1).mean()"))
    succeeds(vse_main, "check", "mean.py:mine")
    assert "is a mean over the queries" in capsys.readouterr().err
    distance = SIMILARITY.replace("image @ caption.T", "torch.cdist(image, caption)")
    without_weights = re.sub(r"    def __init__.*?\n\n", "", distance, flags=re.DOTALL).replace("Network(dim)", "Network()")
    (folder / "distance.py").write_text(without_weights)
    succeeds(vse_main, "check", "distance.py:Mine")
    assert "a distance needs a minus sign" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["loss", "similarity", "extractor"])
def test_a_template_is_sound_and_passes_its_own_test(kind: str, folder: Path, capsys: Capture) -> None:
    succeeds(vse_main, "new", kind, f"my_{kind}.py")
    check, test, _ = capsys.readouterr().out.splitlines()
    succeeds(vse_main, *check.split()[1:])
    namespace: dict[str, object] = {}
    module = (folder / f"my_{kind}.py").read_text()
    source = re.sub(rf"^from my_{kind} import .*$", "", (folder / test.split()[1]).read_text(), flags=re.MULTILINE)
    exec(compile(module + source, "template", "exec"), namespace)
    (run,) = (value for name, value in namespace.items() if name.startswith("test_"))
    assert callable(run)
    run()


def test_a_template_replaces_no_file_and_needs_an_importable_name(folder: Path, fails: Fails) -> None:
    (folder / "my_loss.py").write_text("mine")
    assert "exists already" in fails(vse_main, "new", "loss", "my_loss.py")
    assert "needs a name that Python can import" in fails(vse_main, "new", "loss", "my-loss.py")
    assert (folder / "my_loss.py").read_text() == "mine"


def test_an_extractor_of_ones_own_writes_a_cache_that_names_the_code(demo: Path, folder: Path, fails: Fails) -> None:
    (folder / "own.py").write_text(EXTRACTOR)
    request = ["--dataset", demo, "--shards", 1]
    succeeds(extract_main, "own.py:Mine", *request)
    succeeds(extract_main, "verify", "features/demo_mine.h5")
    (folder / "preset.yaml").write_text("extractor: own.py:Mine\n")
    refusal = fails(extract_main, "cnn", *request, "--feature", "preset.yaml")
    assert "own.py:Mine is code outside of the package" in refusal


def test_an_extractor_that_fails_on_a_photograph_names_it(demo: Path, folder: Path, fails: Fails) -> None:
    failing = "if image_id == 3:\n            raise ValueError('no')\n        return np.asarray(image, np.float32)"
    (folder / "own.py").write_text(EXTRACTOR.replace("return np.asarray(image, np.float32)", failing))
    refusal = fails(extract_main, "own.py:Mine", "--dataset", demo)
    assert re.search(r"own\.py:18: prepare fails at `raise ValueError\('no'\)` .*photograph .*\.(png|jpg)", refusal), refusal


def test_a_wrong_line_in_a_registry_leaves_the_help(monkeypatch: Patch, capsys: Capture, fails: Fails) -> None:
    from vse.features.settings import EXTRACTORS

    monkeypatch.setitem(EXTRACTORS._parts, "colours", "vse.features.extractors.colours:Colours")
    succeeds(extract_main, "--help")
    assert "cnn" in capsys.readouterr().out
    assert "which cannot be imported" in fails(extract_main, "colours", "--dataset", "data/demo/dataset.json")

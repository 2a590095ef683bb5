"""The command ``vse quickstart``, which trains and evaluates a model for the user's photographs or for the demo."""

from __future__ import annotations

import logging
import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from vse.cli import find_weights, load_command
from vse.features.settings import load_feature_preset
from vse.pipeline.command import record_command
from vse.pipeline.errors import UserError
from vse.pipeline.option_types import CliOption, FileOrFolderPath, PositiveInteger, Text
from vse.pipeline.options import Options, command

if TYPE_CHECKING:
    from vse.pipeline.dataset.dataset import Dataset

log = logging.getLogger(__name__)

MIN_PAIRS_FOR_SPLIT = 1000  # with fewer pairs, the evaluation is a cross-validation
N_FOLDS = 5
# Presets of image features, the highest rsum on Flickr8k first (docs/ladder.md).
IMAGE_FEATURES = ("effnet2", "effnet", "mobilenet")
# On Flickr8k, CCA with this correction of hubs has the highest rsum of all compared models (docs/hubness.md).
HUB_CORRECTION = "inverted-softmax"
CCA_REGULARIZATIONS = (0.1, 0.3, 1, 3, 10, 30)  # with few pairs, larger ones than the preset's are better (docs/quickstart.md)
FEW_PAIRS_MIN_WORD_COUNT = 1  # with few pairs, TF-IDF reads words that occur at least this number of times
_ENGLISH_WORDS = {"a", "the", "of", "in", "on", "and", "is", "with", "are"}
_MIN_ENGLISH_SHARE = 0.1  # captions count as English if _ENGLISH_WORDS are at least this share of their words
_N_CAPTIONS_FOR_LANGUAGE = 1000


class QuickstartRequest(Options):
    """The arguments of ``vse quickstart``."""

    photos: Annotated[FileOrFolderPath | None, CliOption(is_argument=True)] = None
    captions: Annotated[FileOrFolderPath | None, CliOption(is_argument=True)] = None
    name: Text | None = None
    """Name of the data set.  [default: the name of the folder PHOTOS, or demo]"""
    threads: PositiveInteger | None = None
    """Number of processor cores to use.  [default: all available]"""


@command("quickstart")
def quickstart_command(request: QuickstartRequest) -> None:
    """Import photographs with captions, extract features, train a model, evaluate it and write a report.

    PHOTOS is a folder of photographs, and CAPTIONS a table of their captions: CSV, JSON lines or parquet. PHOTOS may also be
    another source that vse data import reads, such as a WebDataset archive. Without arguments, the built-in demo is used. All
    files are written into the folders data, features, runs and results of the current folder. If you repeat the command, it
    keeps the results of finished steps.
    """
    click.echo(run_quickstart(request))


def run_quickstart(request: QuickstartRequest) -> str:
    """Run all steps, and return a text with the result, the path of the report, and the commands that were run."""
    from vse.pipeline.dataset.dataset import load_dataset_file

    steps, name = _CommandRunner(request.threads), _choose_dataset_name(request)
    dataset_file = Path("data", name, "dataset.json")
    _prepare_dataset(steps, request, dataset_file)
    dataset = load_dataset_file(dataset_file)
    n_pairs = sum(len(image.captions) for image in dataset.images)
    image_feature, caption_feature = choose_image_feature(name), choose_caption_feature(dataset)
    images, captions = (Path("features", f"{name}_{feature}.h5") for feature in (image_feature, caption_feature))
    steps.run("vse-extract", "cnn", "--dataset", dataset_file, "--feature", image_feature, "--out", images)
    is_small = n_pairs < MIN_PAIRS_FOR_SPLIT
    min_count = FEW_PAIRS_MIN_WORD_COUNT if is_small else None
    if load_feature_preset(caption_feature).fits_encoder:  # the settings may differ from the preset, so the name does, too
        captions = captions.with_name(f"{name}_quickstart_{caption_feature}.h5")
    steps.extract_caption_feature(dataset_file, caption_feature, captions, min_count)
    arguments = ["--features", images, "--experiment", f"cca_effnet+{caption_feature}+{image_feature}"]
    arguments += ["--set", f"solver.regularization={list(CCA_REGULARIZATIONS)}"]
    run = Path("runs", f"{name}_quickstart", "seed-0")
    embeddings = [steps.train(arguments, dataset_file, captions, run)]
    if is_small:
        log.info("%d pairs are too few for one test split: the result covers %d folds", n_pairs, N_FOLDS)
        folds, embeddings = Path("data", f"{name}_folds"), []
        steps.run("vse-data", "folds", dataset_file, "--out", folds, "--count", N_FOLDS)
        for k in range(N_FOLDS):
            fold = folds / f"fold-{k}.json"
            if load_feature_preset(caption_feature).fits_encoder:  # fit it to the training captions of each fold
                captions = Path("features", f"{name}_folds-{k}_{caption_feature}.h5")
                steps.extract_caption_feature(fold, caption_feature, captions, min_count)
            embeddings.append(steps.train(arguments, fold, captions, Path("runs", f"{name}_folds_quickstart", f"seed-{k}")))
    result = Path("results", f"{name}_quickstart.json")
    report = result.with_suffix(".html")
    steps.run("vse-eval", *embeddings, "--correct", HUB_CORRECTION, "--out", result)
    steps.run("vse-report", result, "--out", report)
    commands = [f"  {line}" for line in steps.commands if "_folds" not in line or line.startswith(("vse-data", "vse-eval"))]
    return "\n".join(
        [
            *_describe_result(result),
            f"report: {report}",
            f"search page: vse-serve {run} --split all",
            f"These commands were run{'; vse-train and vse-embed also for each fold' if is_small else ''}:",
            *commands,
        ]
    )


def _describe_result(file: Path) -> Iterator[str]:
    """Yield a sentence for each direction of a result file, with R@10, its 95% interval and the number of candidates."""
    from vse.eval.files.results import mean_and_std, read_result

    result = read_result(file)
    metrics = next(iter(result.protocols.values()))
    targets = {
        "t2i": ("captions", "their image", result.n_images),
        "i2t": ("images", "a caption of theirs", result.n_captions),
    }
    for direction, (queries, answer, n_items) in targets.items():
        r10, _ = mean_and_std(metrics.metric(f"{direction}_r10"))
        low, high = metrics.interval(f"{direction}_r10") or (math.nan, math.nan)
        among = n_items // metrics.folds
        yield f"{r10:.1f}% of the {queries} of the test find {answer} among the first 10 of {among} [{low:.1f}, {high:.1f}]"


def _prepare_dataset(steps: _CommandRunner, request: QuickstartRequest, dataset_file: Path) -> None:
    if request.photos is not None:
        captions = [] if request.captions is None else ["--captions", request.captions]
        steps.run("vse-data", "import", request.photos, *captions, "--out", dataset_file.parent)
    elif not dataset_file.is_file():
        steps.run("vse-data", "demo", "--out", dataset_file.parent)


class _CommandRunner:
    """A runner of ``vse`` commands in this process. ``commands`` has the finished commands as a user types them."""

    def __init__(self, threads: int | None) -> None:
        self.commands: list[str] = []
        self._threads = threads

    def run(self, name: str, *arguments: object) -> None:
        """Run the command ``name``, and print its output to stderr. Raises UserError if the command refuses its input."""
        words = [str(argument) for argument in arguments]
        line = shlex.join([name, *words])
        self.commands.append(line)
        log.info("$ %s", line)
        if self._threads is not None and name in ("vse-extract", "vse-train", "vse-embed"):
            words += ["--threads", str(self._threads)]
        with record_command(line), redirect_stdout(sys.stderr):
            load_command(name.removeprefix("vse-")).main(args=words, prog_name=name, standalone_mode=False)

    def extract_caption_feature(self, dataset_file: Path, feature: str, cache: Path, min_count: int | None) -> None:
        """Extract a caption feature into ``cache``. If ``min_count`` is given, TF-IDF ignores words that occur less often."""
        extractor = load_feature_preset(feature).extractor_name()
        changes = ["--set", f"min_count={min_count}"] if min_count is not None and extractor == "tfidf" else []
        self.run("vse-extract", extractor, "--dataset", dataset_file, "--feature", feature, *changes, "--out", cache)

    def train(self, arguments: Sequence[object], dataset_file: Path, captions: Path, run: Path) -> Path:
        """Train a run, embed the test split of the data set, and return the path of the embeddings.

        ``captions`` is the cache of the caption feature, ``run`` the folder of the run, and ``arguments`` has further
        arguments of ``vse-train``. The embeddings also have a correction for hubs. A hub is a candidate that too many queries
        rank high.
        """
        self.run("vse-train", *arguments, "--captions", dataset_file, "--caption-features", captions, "--out", run, "--resume")
        self.run("vse-embed", run, "--correct", HUB_CORRECTION)
        return run / "test.h5"


def _choose_dataset_name(request: QuickstartRequest) -> str:
    if request.name is not None:
        return request.name
    if request.photos is None:
        return "demo"
    name = re.sub(r"[^a-z0-9]+", "-", request.photos.resolve().name.lower()).strip("-")
    if not name:
        raise UserError(f"{request.photos}: its name is no name for a data set; give one with --name")
    return name


def choose_image_feature(dataset: str) -> str:
    """Return the first image feature whose weights are on this machine.

    The features of :data:`IMAGE_FEATURES` are tried first, then ``fc7``. A feature with random weights, as in the demo, needs
    no file. If no weights are found, return the last of :data:`IMAGE_FEATURES`, whose weights are then downloaded.
    """
    for name in (*IMAGE_FEATURES, "fc7"):
        settings = load_feature_preset(name, dataset)
        if getattr(settings, "weights", None) == "random" or find_weights(str(getattr(settings, "model", ""))):
            return name
    return IMAGE_FEATURES[-1]


def choose_caption_feature(dataset: Dataset) -> str:
    """Return ``minilm`` if captions are English and the weights of MiniLM are on this machine, else ``tfidf``."""
    captions = [caption for image in dataset.images[:_N_CAPTIONS_FOR_LANGUAGE] for caption in image.captions]
    words = [word for caption in captions for word in caption.tokens]
    is_english = sum(word in _ENGLISH_WORDS for word in words) >= _MIN_ENGLISH_SHARE * len(words)
    return "minilm" if is_english and find_weights(str(getattr(load_feature_preset("minilm"), "model", ""))) else "tfidf"

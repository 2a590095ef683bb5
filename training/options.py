"""The options of ``vse-train``, ``vse-embed``, ``vse-search``, ``vse-report``, ``vse-serve`` and ``vse model``.

This module imports no large library, so that ``--help`` is fast.
"""

from __future__ import annotations

from typing import Annotated, Literal

import click
from pydantic import Field

from vse.pipeline.option_types import (
    AllowCode,
    CliOption,
    Device,
    FileOrFolderPath,
    Flag,
    Force,
    NonNegativeInteger,
    PositiveInteger,
    Seed,
    SettingChanges,
    Text,
    ThreadCount,
)
from vse.pipeline.options import Options


class TrainInputs(Options):
    """The input files of a training besides the feature cache. The cache and the experiment name the default files."""

    captions: FileOrFolderPath | None = None
    """The dataset.json of the data set.  [default: the file that the feature cache names]"""
    eval_features: FileOrFolderPath | None = None
    """Feature cache to validate on.  [default: the cache of --features. If the experiment has the setting eval_feature, the
    cache of that feature in the same folder]"""
    caption_features: FileOrFolderPath | None = None
    """Feature cache of captions, for an experiment that reads vectors of captions instead of words.  [default: the cache of
    the experiment's setting caption_feature, in the folder of --features]"""
    truth_features: FileOrFolderPath | None = None
    """Feature cache of ground-truth boxes, for an experiment on phrases.  [default: the cache of the experiment's setting
    truth_feature, in the folder of --features]"""
    start_from: FileOrFolderPath | None = None
    """Initialise the model with the weights of this trained run (its folder).  [default: if the experiment names another
    experiment in the setting start_from, the run of that experiment with the same seed]"""
    weights_dir: Annotated[FileOrFolderPath | None, CliOption(envvar="VSE_WEIGHTS_DIR")] = None
    """Folder of pretrained weights, for an experiment that reads photos by a CNN or captions by a transformer. Weights that
    are not in the folder are downloaded."""
    words: FileOrFolderPath | None = None
    """File of word vectors that initialise the word embeddings.  [default: the file that the experiment names; if it names
    none, word embeddings start at random]"""
    noise: FileOrFolderPath | None = None
    """Make some training pairs wrong, with the changes in this file of vse-data noise."""


class TrainOptions(Options):
    """Rarely used options of a training."""

    log_negatives: Annotated[NonNegativeInteger, CliOption(metavar="N")] = 0
    """Write the N hardest negatives of each epoch and direction of retrieval to the file negatives.csv in the run folder. With
    0, no such file is written."""
    tensorboard: Flag = False
    """Also write TensorBoard events to the run folder."""
    resume: Flag = False
    """Continue the unfinished run in the run folder from its last checkpoint. Without this option, an unfinished run in the
    folder is an error."""
    overwrite: Flag = False
    """Train from the start, and replace the run in the run folder. Without this option, a finished run with the same settings
    is kept, and a run with other settings is an error. If you also give --resume, a run is replaced only if it cannot be
    continued."""
    allow_code: AllowCode = False
    device: Device = "auto"
    threads: ThreadCount = None
    force: Flag = False
    """Replace files in the run folder that no training wrote, e.g. a metrics.csv of another program. Without this option, such
    files are an error. To replace a run, use --overwrite."""


class TrainRequest(Options):
    """A training: the features, the experiment and all options of ``vse-train``."""

    features: FileOrFolderPath
    """The feature cache to train on."""
    experiment: Text = "vsepp"
    """A preset of config/experiments, or a YAML file."""
    sets: SettingChanges = ()
    """Change a setting, e.g. loss.margin=0.1. May be repeated."""
    languages: Text | None = None
    """Languages of the captions to train and validate on, e.g. en,de; the same as --set train.languages=[en,de].
    [default: all]"""
    name: Text | None = None
    """Name of the run in tables.  [default: the experiment and the changes by --set]"""
    seed: Seed = 0
    """Seed of the initial weights and of the order of the training pairs."""
    out: FileOrFolderPath | None = None
    """The run folder.  [default: runs/DATASET_EXPERIMENT/seed-SEED]"""
    inputs: TrainInputs = Field(default_factory=TrainInputs)
    options: TrainOptions = Field(default_factory=TrainOptions)


class RunInputOptions(Options):
    """Files that replace the input files that a trained run names."""

    features: FileOrFolderPath | None = None
    """Read this feature cache instead of the cache that the run names: the same cache at its new path, or a cache of the same
    feature for other photos."""
    captions: FileOrFolderPath | None = None
    """The dataset.json, if it was moved.  [default: the file that the feature cache names]"""
    caption_features: FileOrFolderPath | None = None
    """The cache of caption features, if it was moved.  [default: the cache that the run names]"""
    weights_dir: Annotated[FileOrFolderPath | None, CliOption(envvar="VSE_WEIGHTS_DIR")] = None
    """Folder of the weights of the CNN or text encoder that computes the features of new photos or captions."""
    images: FileOrFolderPath | None = None
    """Search this folder of photos instead of a split. The command computes the features of the photos, and needs no data set
    and no cache."""


class EmbedRequest(Options):
    """The arguments of ``vse-embed``."""

    runs: Annotated[tuple[FileOrFolderPath, ...], CliOption(is_argument=True, metavar="RUN...")]
    split: Text | None = None
    """The split to embed.  [default: test]"""
    as_features: Annotated[FileOrFolderPath | None, CliOption(metavar="PREFIX")] = None
    """Write the embeddings of all splits as two feature caches, PREFIX_images.h5 and PREFIX_captions.h5."""
    out: FileOrFolderPath | None = None
    """The file to write.  [default: RUN/SPLIT.h5; for another data set than the training data, RUN/DATASET_SPLIT.h5]"""
    files: RunInputOptions = Field(default_factory=RunInputOptions)
    allow_unfinished: Annotated[Flag, CliOption(("--allow-unfinished", "--unfinished"))] = False
    """Allow a run whose training did not finish. The output file records this. Without this option, such a run is an error."""
    allow_leak: Flag = False
    """Allow images that the run was trained on. The output file records their number. Without this option, such images are an
    error."""
    last_epoch: Flag = False
    """Use the weights of the last epoch instead of the best epoch. The default of --out is then RUN/SPLIT_last.h5."""
    correct: Annotated[Text | None, CliOption(metavar="METHOD[:NAME=VALUE,...]")] = None
    """Also compute a correction that lowers the scores of hubs, the candidates that rank high for many queries. The correction
    is stored in the run folder, and applied by vse-search and vse-serve. METHOD is mean (the mean score of a candidate is
    subtracted), csls, nnn (nearest neighbour normalisation) or inverted-softmax, e.g. csls:k=10. Parameters that you do not
    give are selected on the validation split. Hubs are found with the queries of the training split. The embeddings of both
    splits are also written, to RUN/val.h5 and RUN/train.h5."""
    pool_regions: Annotated[PositiveInteger | None, CliOption(metavar="FACTOR")] = None
    """For a model that compares regions with words: group similar regions of each image, and store only the mean of each
    group. With FACTOR 3, a third of the vectors is stored. The default of --out is then RUN/SPLIT_pooled_FACTOR.h5."""
    bank_images: Annotated[PositiveInteger | None, CliOption(metavar="N")] = None
    """For a model that scores each pair, such as SCAN: also score the split against N random training images and their
    captions. vse-eval --correct needs these scores to find hubs with training queries."""
    shortlist: Flag = False
    """For a TOD-Net with a condition (most experiments todnet_...): save time, and score only promising pairs with its
    network. The network scores pairs in rounds, in descending order of their scores without it. The rounds end when no pair
    of a round has a higher score than the right answer to its query. All other pairs rank last. The default of --out is then
    RUN/SPLIT_shortlist.h5."""
    sentences: Flag = False
    """For a run that localises phrases: write the scores of captions with images, which vse-eval --ensemble reads, instead of
    the scores of phrases with boxes."""
    allow_code: AllowCode = False
    device: Device = "auto"
    threads: ThreadCount = None
    force: Force = False


class RunSearchOptions(Options):
    """The options of a search with a run, without the run and the query."""

    k: Annotated[PositiveInteger, CliOption(("-k",))] = 10
    """Number of results."""
    split: Text | None = None
    """The split to search, or several splits, e.g. train,val, or all.  [default: test, or all if no split has this name]"""
    corpus: FileOrFolderPath | None = None
    """Search the items in this file of embeddings, which vse-embed wrote for RUN, instead of a split."""
    index: FileOrFolderPath | None = None
    """File of a FAISS index, for faster searches. If the file is missing, the search writes it. Without this option, each
    search embeds the split again."""
    index_type: Annotated[Text | None, CliOption(metavar="FACTORY")] = None
    """With --index: type of a new index, such as IVF1024,Flat or HNSW32.  [default: Flat]"""
    index_parameters: Annotated[Text, CliOption(metavar="NAME=NUMBER")] = ""
    """With --index: search parameters of the index, such as nprobe=16 or efSearch=64."""
    rerank: Annotated[PositiveInteger | None, CliOption(metavar="K")] = None
    """For models that score each pair, such as SCAN, and for order embeddings: first find K candidates by a fast comparison of
    one vector per item, then score only these K candidates. A higher K is slower, but misses fewer results.  [default: score
    all candidates; for order embeddings 200]"""
    html: FileOrFolderPath | None = None
    """Also write an HTML page with the photos that are found."""


class SearchCommandRequest(Options):
    """The arguments of ``vse-search``: the run, the query and the options of the search."""

    run: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    query: Annotated[Text, CliOption(is_argument=True)]
    search: RunSearchOptions = Field(default_factory=RunSearchOptions)
    files: RunInputOptions = Field(default_factory=RunInputOptions)
    image: FileOrFolderPath | None = None
    """For a run that localises phrases: the photo in which to find the phrase QUERY. The feature cache must have the boxes of
    this photo."""
    allow_code: AllowCode = False
    device: Device = "auto"
    threads: ThreadCount = None
    force: Force = False


class ReportRequest(Options):
    """The arguments of ``vse-report``."""

    results: Annotated[tuple[FileOrFolderPath, ...], CliOption(is_argument=True, metavar="RESULT...")]
    out: FileOrFolderPath
    """The report to write (HTML)."""
    data: FileOrFolderPath | None = None
    """The dataset.json, if it is not at the path that the embeddings record."""
    embeddings: tuple[FileOrFolderPath, ...] = ()
    """Embeddings file of the first seed, if it is not at the path that RESULT records. Give one file for each RESULT."""
    queries: NonNegativeInteger | None = None
    """Number of queries to display in each direction.  [default: 12; with --gallery the 20 best and the 20 worst]"""
    gallery: Flag = False
    """Display the best and the worst queries, with filters by rank. Without this option, a third of the displayed queries are
    right at rank 1, a third are near misses, and a third are failures. A report on two RESULTs always displays the queries
    whose ranks differ most."""
    seed: Seed = 0
    """Seed of the random sample of the displayed queries."""
    allow_code: AllowCode = False
    force: Force = False


class ServeRequest(Options):
    """The arguments of ``vse-serve``."""

    runs: Annotated[tuple[FileOrFolderPath, ...], CliOption(is_argument=True, metavar="RUN...")]
    k: Annotated[PositiveInteger, CliOption(("-k",), click_type=click.IntRange(1, 100))] = 10
    """Default number of results per query. A request can ask for more or fewer."""
    split: Text | None = None
    """The split to search, or several splits, e.g. train,val, or all.  [default: test, or all if no split has this name]"""
    features: tuple[FileOrFolderPath, ...] = ()
    """Read this feature cache instead of the cache that the run names: the same cache at its new path, or a cache of the same
    feature for other photos. With several RUNs, give one cache for each, in the same order."""
    captions: FileOrFolderPath | None = None
    """The dataset.json, if it was moved.  [default: the file that the feature caches name]"""
    caption_features: tuple[FileOrFolderPath, ...] = ()
    """The cache of caption features, if it was moved. With several RUNs, give one cache for each, in the same order.
    [default: the cache that the run names]"""
    weights_dir: Annotated[FileOrFolderPath | None, CliOption(envvar="VSE_WEIGHTS_DIR")] = None
    """Folder of the weights of the CNN or text encoder that computes the features of new photos or captions."""
    images: FileOrFolderPath | None = None
    """Search this folder of photos instead of a split. The command computes the features of the photos, and needs no data set
    and no cache."""
    index_type: Annotated[Text | None, CliOption(metavar="FACTORY")] = None
    """Type of the FAISS index that the server builds, such as IVF1024,Flat or HNSW32.  [default: Flat]"""
    index_parameters: Annotated[Text, CliOption(metavar="NAME=NUMBER")] = ""
    """Parameters of the index, such as nprobe=16 or efSearch=64."""
    rerank: Annotated[PositiveInteger, CliOption(metavar="K")] = 200
    """For models that score each pair, such as SCAN, and for order embeddings: first find K candidates by a fast comparison of
    one vector per item, then score only these K candidates. A higher K is slower, but misses fewer results."""
    held_gb: Annotated[float, CliOption(click_type=click.FloatRange(0))] = 4.0
    """For models that score each pair, such as SCAN: maximum memory in GB for the encoded images or captions of a run. If they
    need more, each query encodes its candidates again."""
    host: Text = "127.0.0.1"
    """The address to listen on; with 0.0.0.0, other machines can also reach the page."""
    port: Annotated[int, CliOption(click_type=click.IntRange(0, 65535))] = 8000
    """The port; 0 chooses a free port."""
    upload_mb: Annotated[int, CliOption(click_type=click.IntRange(1, 1024))] = 20
    """Largest size in MB of a photo that a user uploads."""
    max_megapixels: Annotated[float, CliOption(click_type=click.FloatRange(0.01, 80))] = 25.0
    """Largest size in megapixels of a photo that a user uploads."""
    check: Flag = False
    """Load all runs, answer one query, print the best hit of each run, and end."""
    allow_code: AllowCode = False
    device: Device = "auto"
    threads: ThreadCount = None


class PackOptions(Options):
    """The options of a packed model."""

    with_backbone: Flag = False
    """Also pack the networks that compute the features, such as a CNN. Without this option, the folder has only the names and
    hashes of these networks, and a search in new photos needs their weights."""
    results: Annotated[tuple[FileOrFolderPath, ...], CliOption(("--result",))] = ()
    """Result file of vse-eval --out; the model card lists the metrics in it. May be repeated.  [default: RUN/test.h5 is
    evaluated, if it exists]"""
    licence: Text | None = None
    """Licence of the model, such as cc-by-4.0."""
    notes: FileOrFolderPath | None = None
    """Text file (Markdown) to add to the model card."""
    weights_dir: Annotated[FileOrFolderPath | None, CliOption(envvar="VSE_WEIGHTS_DIR")] = None
    """With --with-backbone: folder with the weights of the networks that compute the features."""


class PackRequest(Options):
    """The arguments of ``vse model pack``."""

    run: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    out: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    options: PackOptions = Field(default_factory=PackOptions)
    force: Flag = False
    """Replace the packed model in OUT. Without this option, a folder OUT that exists is an error. A folder that is not a
    packed model is never replaced."""


class PushRequest(Options):
    """The arguments of ``vse model push``."""

    folder: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    name: Annotated[Text, CliOption(is_argument=True)]
    private: Flag = False
    """Create a private repository."""


class CheckRequest(Options):
    """The arguments of ``vse check``."""

    part: Annotated[Text, CliOption(is_argument=True)]
    sets: SettingChanges = ()
    """Change a setting of PART. May be repeated."""


class NewRequest(Options):
    """The arguments of ``vse new``."""

    kind: Annotated[Literal["loss", "similarity", "extractor"], CliOption(is_argument=True)]
    file: Annotated[FileOrFolderPath, CliOption(is_argument=True)]

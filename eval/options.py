"""The options of ``vse-eval`` and ``vse-table``, and their default values.

Importing this module loads no large library, which keeps ``--help`` fast.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import Field

from vse.eval import DEFAULT_KS
from vse.pipeline.errors import UserError
from vse.pipeline.option_types import (
    CliOption,
    Device,
    FileOrFolderPath,
    Flag,
    Force,
    NearestChoice,
    NonNegativeInteger,
    PositiveInteger,
    Share,
    Text,
)
from vse.pipeline.options import Options

COCO_PROTOCOLS = ("cxc", "eccv")
N_IMAGES_PER_FOLD = 1000  # images in a fold of the folded protocols
FOLDED_PROTOCOLS = ("1k", "sentence-1k")  # protocols whose metrics are means over folds
PROTOCOLS = ("1k", "full", "sentence", "sentence-1k", *COCO_PROTOCOLS)
JUDGED_PREFIX = "judged-"  # prefix of the protocols whose right answers people judged, e.g. judged-expert
CHOICES_PROTOCOL = "choices"  # protocol of all choices in a file; choices-same_type has the choices of one kind
PHRASE_PROTOCOL = "phrase"  # name of the protocol of phrase scores, and of its only direction, from phrases to regions
DEFAULT_IOU_THRESHOLD = 0.5  # a candidate box is right if its IoU with the ground-truth box reaches this threshold
N_BOOTSTRAP_SAMPLES = 1000  # number of bootstrap samples for a confidence interval
N_CROSS_CHECK_QUERIES = 1000  # number of queries per direction that are compared with a FAISS search; 0 compares all
N_COMPARISON_BOOTSTRAP_SAMPLES = 10_000  # number of bootstrap samples for a p-value of a comparison
TREC_DEPTH = 1000  # number of answers for each query in a TREC run file
P_VALUE_CORRECTIONS = ("holm", "bonferroni", "fdr")  # corrections of p-values for the number of comparisons
COST_NAMES = ("extraction_s", "train_s", "eval_s", "total_s", "cache_mb", "model_mb")  # costs in seconds (_s) or MB (_mb)
N_REPORT_QUERIES = 12  # number of queries of each direction that a report displays
N_GALLERY_QUERIES = 20  # number of best queries, and of worst queries, of each direction in a gallery


def published_folder() -> Path:
    """Return the folder of the published tables, ``config/published``."""
    return Path(str(files("vse.presets").joinpath("published")))


def published_table_names() -> list[str]:
    """Return the names of all published tables, ``<paper>_<table>``, such as ``vsepp_3``."""
    return sorted(path.stem for path in published_folder().glob("*.csv"))


# --compare accepts these options; other options for embeddings are errors.
OPTIONS_ALLOWED_WITH_COMPARE = ("judgements", "qrels", "choices", "language", "pairs")
# --choices accepts none of these options.
_OPTIONS_EXCLUDED_BY_CHOICES = ("judgements", "qrels", "language", "pairs", "index", "rerank", "compress", "trec", "cxc", "k")
_MIN_BOOTSTRAP_SAMPLES = 100  # fewest bootstrap samples of an interval


def _parse_recall_ks(text: Any) -> tuple[int, ...]:
    """Return the positive integers in a text, separated by commas or blanks. Raises UserError for any other text."""
    if not isinstance(text, str):
        return tuple(text)
    numbers = text.replace(",", " ").split()
    wrong = next((k for k in numbers if not (k.isascii() and k.isdecimal() and 0 < int(k) < 10**9)), None)
    if wrong is not None:
        raise UserError(f"--k {text}: {wrong} is not a positive integer; give e.g. --k 20,50")
    return tuple(map(int, numbers))


class EvaluateOptions(Options):
    """Rarely used options of an evaluation."""

    allow_unfinished: Annotated[Flag, CliOption(("--allow-unfinished", "--unfinished"))] = False
    """Accept runs whose training did not finish. The result lists these runs. Without this option, such a run is an error."""
    iou: Share | None = Field(
        None,
        description="With phrase scores: lowest IoU with the true box at which a candidate box is right.  [default: "
        f"{DEFAULT_IOU_THRESHOLD}]",
    )
    cxc: Annotated[FileOrFolderPath | None, CliOption(metavar="FOLDER")] = None
    """Folder with sis_test.csv and sts_test.csv of Crisscrossed Captions. The protocol cxc then also reports image-to-image
    (i2i) and text-to-text (t2t) retrieval."""
    judgements: Annotated[tuple[Text, ...], CliOption(metavar="KIND=FILE")] = ()
    """File with people's judgements of image-caption pairs. KIND is expert or crowd (the files of Flickr8k), or qrels (TREC).
    Each file adds a protocol, e.g. judged-expert. May be repeated."""
    dataset: Annotated[FileOrFolderPath | None, CliOption(metavar="FILE")] = None
    """With --judgements: the dataset.json with the names of image files.  [default: the file that the embeddings name]"""
    cross_check: Flag = True
    """Compare the exact ranks with a FAISS search. A difference that is not a tie is an error."""
    cross_checked: Annotated[NonNegativeInteger, CliOption(metavar="N")] = N_CROSS_CHECK_QUERIES
    """Number of queries per direction and protocol that are compared with FAISS, sampled at random; 0 for all."""
    device: Device = "auto"


class AllEvaluateOptions(EvaluateOptions):
    """All options of an evaluation: its metrics, and the files that are written in addition to the result.

    Phrase scores accept only ``bootstrap``, ``iou`` and ``allow_unfinished``.
    """

    bootstrap: NonNegativeInteger | None = Field(
        None,
        description="Number of bootstrap samples of the images for 95% intervals; 0 computes no intervals.  [default: "
        f"{N_BOOTSTRAP_SAMPLES}, with --compare {N_COMPARISON_BOOTSTRAP_SAMPLES}]",
    )
    k: Annotated[
        tuple[PositiveInteger, ...],
        CliOption(metavar="K,...", click_type=click.types.FuncParamType(_parse_recall_ks), is_repeated=False),
    ] = Field(
        (),
        description=f"Further K of R@K, e.g. 20,50, besides {', '.join(map(str, DEFAULT_KS))}. These further R@K do not count "
        "in rsum.",
    )
    ensemble: Flag = False
    """Treat FILES as members of an ensemble, and average their scores. With several seeds, there is one ensemble per seed."""
    experiment: Text | None = None
    """With --ensemble: preset of an ensemble, e.g. scan_t2i_avg_i2t_lse. FILES must then come from the experiments that this
    preset lists. Without this option, FILES may come from any experiments."""
    alpha: Share | None = None
    """With --ensemble of an image-sentence model and a phrase model: weight of the phrase model's scores, from 0 to 1. The
    scores of the image-sentence model have the weight 1 - ALPHA.  [default: the best on the validation split]"""
    save: FileOrFolderPath | None = None
    """With --ensemble: also write the embeddings or scores of the ensemble to this file, e.g. for --compare. With several
    seeds, each seed has a file, with the seed in its name."""
    index: Annotated[Text | None, CliOption(metavar="FACTORY")] = None
    """Also evaluate an approximate search with this type of FAISS index, e.g. IVF1024,Flat or HNSW32. Its R@K is reported, and
    the share of the exact top K that it finds. With several seeds, the first one is searched."""
    index_parameters: Text = ""
    """Search parameters of --index, e.g. nprobe=16."""
    rerank: Annotated[tuple[PositiveInteger, ...], CliOption(metavar="K")] = ()
    """For models that score each pair, such as SCAN, and for order embeddings: also report the metrics of a two-stage search.
    The first stage finds K candidates by a fast comparison of one vector per item. The second stage scores only these K
    candidates. With several seeds, the first one is searched. May be repeated."""
    qrels: Annotated[FileOrFolderPath | None, CliOption(metavar="FILE")] = None
    """TREC qrels with grades, the same as --judgements qrels=FILE."""
    choices: Annotated[FileOrFolderPath | None, CliOption(metavar="FILE")] = None
    """Evaluate only the choices in this file. In a choice, the model selects one of a few captions for an image. The commands
    vse-data swap-phrases and import-choices write such files."""
    correct: Annotated[Text | None, CliOption(metavar="METHOD[:NAME=VALUE,...]")] = None
    """Lower the scores of hubs, the candidates that rank high for many queries. METHOD is mean (the mean score of a candidate
    is subtracted), csls, nnn (nearest neighbour normalisation), inverted-softmax or qb-norm. NAME=VALUE sets a parameter, e.g.
    csls:k=10. Parameters that you do not give are selected on the validation split."""
    bank: Annotated[Text | None, CliOption(metavar="SPLIT|FILE")] = None
    """With --correct: the queries with which hubs are found, called the bank. Give a file of embeddings, or a split such as
    train, if the file train.h5 is in the folder of FILES. For a model that scores each pair, such as SCAN, only two banks
    are possible: the evaluated split, and train, which needs FILES from vse-embed --bank-images.  [default: train]"""
    compress: Annotated[tuple[Text, ...], CliOption(metavar="CODEC")] = ()
    """Also report the metrics of compressed embeddings. CODEC is dims=128,64 (the first 128 and the first 64 dimensions), int8
    (a byte per dimension), binary (a bit per dimension) or pq32 (a product quantiser of 32 bytes). May be repeated."""
    rescore: Annotated[PositiveInteger | None, CliOption(metavar="K")] = None
    """With --compress: rank the best K candidates of each query again by the uncompressed embeddings, and report these
    metrics, too."""
    language: Text | None = None
    """Evaluate the captions in this language, e.g. de, on the images that have captions in all languages of FILES.
    [default: all captions]"""
    pairs: Annotated[tuple[Text, ...], CliOption(metavar="LANGUAGE:LANGUAGE")] = ()
    """Search the captions in one language with the captions in another, in both directions, e.g. en:de. May be repeated."""
    per_query: Annotated[FileOrFolderPath | None, CliOption(metavar="FILE")] = None
    """Also write a row per query to this .csv or .parquet file: the best right answer with its rank (from 0), and the best
    wrong answer."""
    trec: Annotated[FileOrFolderPath | None, CliOption(metavar="FOLDER")] = None
    """Also write TREC run and qrels files of the whole split to this folder, for trec_eval, ranx and ir_measures."""
    trec_depth: NonNegativeInteger | None = Field(
        None, description=f"With --trec: number of answers per query in a run file, 0 for all.  [default: {TREC_DEPTH}]"
    )

    @property
    def n_bootstrap_samples(self) -> int:
        """The number of bootstrap samples for an interval; the default number if the option is not set."""
        return N_BOOTSTRAP_SAMPLES if self.bootstrap is None else self.bootstrap

    @property
    def recall_ks(self) -> list[int]:
        """Every K for which R@K is computed, in ascending order."""
        return sorted({*DEFAULT_KS, *self.k})

    @property
    def first_embeddings_option(self) -> str | None:
        """The first option, e.g. ``--index``, that is set and applies only to embeddings; None without such an option."""
        names = (
            "ensemble",
            "correct",
            "index",
            "rerank",
            "compress",
            "per_query",
            "trec",
            "k",
            "cxc",
            "judgements",
            "qrels",
            "choices",
            "language",
            "pairs",
        )
        given = next((name for name in names if getattr(self, name)), None)
        return None if given is None else f"--{given.replace('_', '-')}"

    def check_combinations(self) -> None:
        """Raise UserError for a wrong combination of options, or if there are too few bootstrap samples.

        A combination is wrong if an option lacks another option that it needs, or if two options contradict each other.
        """
        if self.experiment is not None and not self.ensemble:
            raise UserError("--experiment names the preset of an ensemble and needs --ensemble")
        for option, value in (("--alpha", self.alpha), ("--save", self.save)):
            if value is not None and not self.ensemble:
                raise UserError(f"{option} applies to an ensemble and needs --ensemble")
        if self.bank is not None and self.correct is None:
            raise UserError("--bank is the bank of a correction: name it with --correct")
        if self.correct is not None and self.ensemble:
            raise UserError("--correct applies to one model: save the ensemble with --save, and correct that")
        if self.correct is not None and (self.language is not None or self.pairs):
            raise UserError("--correct has a bank of all languages: leave it out, or --language and --pairs")
        excluded = next((name for name in _OPTIONS_EXCLUDED_BY_CHOICES if getattr(self, name)), None)
        if self.choices is not None and excluded is not None:
            raise UserError(f"--choices evaluates only the choices: leave --{excluded} out")
        if self.rescore is not None and not self.compress:
            raise UserError("--rescore ranks candidates of compressed embeddings again: name codecs with --compress")
        if self.compress and self.correct is not None:
            raise UserError("--compress and --correct change the same vectors: leave one of the options out")
        if self.language is not None and self.pairs:
            raise UserError("--pairs compares two languages, and --language selects one: leave one of the options out")
        if self.index_parameters and not self.index:
            raise UserError("--index-parameters needs an index: name it with --index")
        if self.trec_depth is not None and self.trec is None:
            raise UserError("--trec-depth applies to run files: name their folder with --trec")
        if self.bootstrap and self.bootstrap < _MIN_BOOTSTRAP_SAMPLES:
            raise UserError(
                f"--bootstrap {self.bootstrap}: an interval needs at least {_MIN_BOOTSTRAP_SAMPLES} samples; 0 computes no "
                "interval"
            )


class EvaluationRequest(Options):
    """The arguments of ``vse-eval``."""

    files: Annotated[tuple[FileOrFolderPath, ...], CliOption(is_argument=True)]
    protocol: Annotated[tuple[Text, ...], CliOption(click_type=NearestChoice(["auto", *PROTOCOLS, PHRASE_PROTOCOL]))] = (
        "auto",
    )
    """Protocol to evaluate. May be repeated. full: the whole split. 1k: the mean over folds of 1,000 images. sentence,
    sentence-1k: the same for caption-to-caption retrieval. cxc, eccv: the COCO test set with the additional right answers of
    Crisscrossed Captions or ECCV Caption (needs the package eccv-caption). phrase: the metrics of phrase scores. auto: full,
    1k if there are at least 1,000 images, and cxc and eccv for the COCO test set."""
    compare: Flag = False
    """Treat FILES as the files of two models, and test the difference of each metric."""
    options: AllEvaluateOptions = Field(default_factory=AllEvaluateOptions)
    out: FileOrFolderPath | None = None
    """Result file to write (JSON).  [default: no file; with --compare, results/DATASET_A_vs_B.json]"""
    force: Force = False


class TableRequest(Options):
    """The input of a table: its result files, and options that only some tables accept."""

    results: Annotated[tuple[FileOrFolderPath, ...], CliOption(is_argument=True)] = ()
    dataset: Text | None = None
    """For a published table: compare all rows with your results on this data set.  [default: for each row, your results on the
    data set that the paper used]"""
    cost: Annotated[Text | None, CliOption(click_type=NearestChoice(COST_NAMES))] = None
    """For TABLE ladder: the cost that is compared with rsum, in seconds (_s) or MB (_mb).  [default: total_s]"""
    family: Annotated[Text | None, CliOption(click_type=NearestChoice(P_VALUE_CORRECTIONS))] = None
    """Correction of p-values for the number of comparisons. With this option, summary, ladder and the published tables mark
    each result with letters. Results that share a letter do not differ significantly in rsum, if all pairs are compared.
    TABLE compare has a correction in any case.  [default: none; holm for TABLE compare]"""
    metric: Annotated[Text | None, CliOption(metavar="NAME")] = None
    """For TABLE compare: the metric in which results are compared, e.g. i2t_r1.  [default: rsum]"""
    transductive: Flag = False
    """Keep results of vse-eval --correct whose hubs were found with the test queries, e.g. by --bank test. Without this
    option, these results are left out: a model that knows the other test queries has an advantage."""

"""What an evaluation is asked for beside its protocols; importing this costs nothing.

What a result says in a line, for a person at a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vse.eval.defaults import BOOTSTRAP_SAMPLES, CROSS_CHECK_QUERIES, RECALLS
from vse.eval.files.results import Combination, Result, mean_and_std
from vse.eval.ranking.metrics import POSITION_METRICS, metric_title
from vse.pipeline.errors import UserError

_FEWEST = 100  # samples of an interval


@dataclass(frozen=True)
class EvaluationOptions:
    """How a model is evaluated, and what is written beside the result.

    Attributes
    ----------
    cross_check : compare the ranks with a search by FAISS
    cross_checked : of how many queries of each direction of a protocol, drawn at random; 0 for all
    bootstrap : samples of the images for 95% intervals, 0 for none
    unfinished : take embeddings of runs that did not finish, too; then the result names them
    ks : further K of R@K, beside 1, 5 and 10
    cxc : folder of the pairs that Crisscrossed Captions judged: the protocol ``cxc`` then has image-to-image and text-to-text
        retrieval, too (see :mod:`vse.eval.protocols.coco`)
    together : the files are the members of an ensemble, or of each of its seeds (see
        :func:`vse.eval.protocols.ensemble.members_by_seed`): what is evaluated is the mean of their scores
    experiment : of an ensemble, the preset that says what its members are; without it, it is named by their experiments
    alpha : of an ensemble of which one member scores by phrases, their share; by default chosen by validation (see
        :mod:`vse.eval.protocols.ensemble`)
    save : where the ensemble's embeddings or scores are written, those of seed S of several to ``<name>-S.h5``
    index : factory string of a FAISS index: how much it finds of what the exact search finds, and its own R@K over the whole
        split, go into the result, of the first seed (see :func:`vse.eval.search.approximate.approximate_recalls`)
    index_parameters : how thoroughly the index is searched
    rerank : for each K here, what a search that scores only K candidates of a first stage gives (see
        :func:`vse.eval.search.approximate.reranked_metrics`)
    per_query : file for what each query got (see :func:`vse.eval.files.query_files.write_per_query`)
    trec : folder for run and qrels files of the whole split (see :func:`vse.eval.files.query_files.write_trec`)
    trec_depth : how many answers to a query are in a run file, 0 for all; None is 1,000
    """

    cross_check: bool = True
    cross_checked: int = CROSS_CHECK_QUERIES
    bootstrap: int = BOOTSTRAP_SAMPLES
    unfinished: bool = False
    ks: Sequence[int] = ()
    cxc: Path | None = None
    together: bool = False
    experiment: str | None = None
    alpha: float | None = None
    save: Path | None = None
    index: str | None = None
    index_parameters: str = ""
    rerank: Sequence[int] = ()
    per_query: Path | None = None
    trec: Path | None = None
    trec_depth: int | None = None

    @property
    def of_embeddings(self) -> str | None:
        """The first option here, by its name, that is of one model's embeddings alone; None if there is none."""
        given = {
            "--ensemble": self.together,
            "--index": self.index,
            "--rerank": self.rerank,
            "--per-query": self.per_query,
            "--trec": self.trec,
            "--k": self.ks,
            "--cxc": self.cxc,
        }
        return next((option for option, value in given.items() if value), None)

    def check(self) -> None:
        """:class:`UserError` for an option that lacks another one, or that is out of its range."""
        if self.experiment is not None and not self.together:
            raise UserError("--experiment names the preset of an ensemble: give --ensemble, too")
        for option, value in (("--alpha", self.alpha), ("--save", self.save)):
            if value is not None and not self.together:
                raise UserError(f"{option} is of an ensemble: give --ensemble, too")
        if self.index_parameters and not self.index:
            raise UserError("--index-parameters are those of an index: name it with --index")
        if self.trec_depth is not None and self.trec is None:
            raise UserError("--trec-depth is that of run files: name their folder with --trec")
        if self.bootstrap and self.bootstrap < _FEWEST:
            raise UserError(f"--bootstrap {self.bootstrap}: an interval takes {_FEWEST} samples at least, or 0 for none")
        depths = [] if self.trec_depth is None else [self.trec_depth]
        checked = ("--cross-checked", [self.cross_checked], 0)
        for option, numbers, low in (checked, ("--k", self.ks, 1), ("--rerank", self.rerank, 1), ("--trec-depth", depths, 0)):
            for number in numbers:
                if number < low:
                    raise UserError(f"{option} {number}: no number from {low} on")


def summary_line(result: Result, protocol: str) -> str:
    """The recalls of each direction, or what a protocol has in their place, and rsum where there is one; for a person."""
    shown = result.protocols[protocol]
    parts = []
    for direction, metrics in shown.directions.items():
        names = [name for name in metrics if name not in ("medr", "meanr", *POSITION_METRICS)]
        if names:
            labels = "/".join(map(metric_title, names))
            labels = labels if "mAP@R" in labels else labels.replace("/R@", "/")
            parts.append(f"{direction} {labels} " + " / ".join(f"{mean_and_std(metrics[name])[0]:.1f}" for name in names))
    if shown.rsum is not None:
        interval = shown.interval("rsum")
        parts.append(
            f"rsum {mean_and_std(shown.rsum)[0]:.1f}" + (f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else "")
        )
    facts = ([f"trained on {result.trained_on}"] if result.trained_on else []) + (
        ["not finished"] if result.unfinished else []
    )
    said = f" ({', '.join(facts)})" if facts else ""
    return f"{result.dataset} {result.display_name}{said} {protocol}: {', '.join(parts)}"


def index_line(index: Mapping[str, Any]) -> str:
    """What an approximate index finds, for a person."""
    what = " ".join(filter(None, [index["factory"], index["parameters"]]))
    directions = []
    for direction in ("i2t", "t2i"):
        side = index[direction]
        flat = " (Flat)" if side["factory"] != index["factory"] else ""
        recall = f"{side['recall_at_10']:.1f}% of the exact top 10"
        directions.append(f"{direction}{flat} R@1/5/10 {_slashed(side)}, {recall}")
    reranked = f"; {index['reranked']} candidates re-ranked by exact scores" if "reranked" in index else ""
    return f"index {what}: {', '.join(directions)}{reranked}"


def rerank_line(rerank: Mapping[str, Any]) -> str:
    """What a re-ranking of some candidates gives, beside the exact metrics, for a person."""
    exact, directions = rerank["exact"], []
    for direction in ("i2t", "t2i"):
        side = rerank[direction]
        recalls = f"R@1/5/10 {_slashed(side)} (exact {_slashed(exact[direction])})"
        directions.append(f"{direction} {recalls}, {side['found']:.1f}% found")
    sums = f"rsum {rerank['rsum']:.1f} (exact {exact['rsum']:.1f}, lost {rerank['lost']['rsum']:.1f})"
    return f"best {rerank['reranked']} re-ranked: {', '.join(directions)}, {sums}"


def combination_line(combination: Combination) -> str:
    """How much phrases count in an ensemble, and where they do not, for a person."""
    by = "by validation" if combination.rsum_val else "as given"
    without = (
        f"{combination.n_captions_without_phrases:,} captions without phrases, "
        f"{combination.n_images_without_regions:,} images without regions"
    )
    return f"share of phrases (alpha) {combination.alpha:g}, {by}; {without}"


def _slashed(recalls: Mapping[str, Any]) -> str:
    return " / ".join(f"{recalls[f'r{k}']:.1f}" for k in RECALLS)

"""What an evaluation is asked for beside its protocols; importing this costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vse.eval.defaults import CROSS_CHECKED, SAMPLES
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
        retrieval, too (see :mod:`vse.eval.protocols.crisscrossed`)
    together : the files are the members of an ensemble, or of each of its seeds (see
        :func:`vse.eval.protocols.ensemble.members_by_seed`): what is evaluated is the mean of their scores
    experiment : of an ensemble, the preset that says what its members are; without it, it is named by their experiments
    alpha : of an ensemble of which one member scores by phrases, their share; by default chosen by validation (see
        :mod:`vse.eval.protocols.combination`)
    save : where the ensemble's embeddings or scores are written, those of seed S of several to ``<name>-S.h5``
    index : factory string of a FAISS index: how much it finds of what the exact search finds, and its own R@K over the whole
        split, go into the result, of the first seed (see :func:`vse.eval.search.approximate.approximate_recalls`)
    index_parameters : how thoroughly the index is searched
    rerank : for each K here, what a search that scores only K candidates of a first stage gives (see
        :func:`vse.eval.search.reranking.reranked_metrics`)
    per_query : file for what each query got (see :func:`vse.eval.files.per_query.write_per_query`)
    trec : folder for run and qrels files of the whole split (see :func:`vse.eval.files.trec.write_trec`)
    trec_depth : how many answers to a query are in a run file, 0 for all; None is 1,000
    """

    cross_check: bool = True
    cross_checked: int = CROSS_CHECKED
    bootstrap: int = SAMPLES
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

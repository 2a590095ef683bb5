"""The options of an evaluation besides its files and protocols. Importing this module is cheap, since the commands do so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vse.eval.defaults import BOOTSTRAP_SAMPLES, CROSS_CHECK_QUERIES, RECALLS
from vse.pipeline.errors import UserError

_FEWEST_SAMPLES = 100  # of an interval


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of ``vse-eval``: how a model is evaluated, and which files are written besides the result.

    All options apply to files of embeddings or scores; phrase scores take only ``bootstrap`` and ``unfinished``. The names are
    those of the command, whose help describes them.

    Attributes
    ----------
    cross_checked : number of queries per direction of a protocol that are compared with FAISS; 0 compares all
    bootstrap : number of bootstrap samples: at least 100, or 0 for no intervals
    ks : further K of R@K, besides 1, 5 and 10
    experiment : preset that lists the members of an ensemble; None accepts any members
    alpha : share of the member that scores by phrases; None chooses it (:func:`vse.eval.protocols.ensemble.choose_alpha`)
    save : file for the embeddings or scores of the ensemble; with several seeds, seed S is written to ``<name>-S.h5``
    trec_depth : number of answers per query in a run file; 0 writes all answers, None 1,000
    """

    cross_check: bool = True
    cross_checked: int = CROSS_CHECK_QUERIES
    bootstrap: int = BOOTSTRAP_SAMPLES
    unfinished: bool = False
    ks: Sequence[int] = ()
    cxc: Path | None = None
    ensemble: bool = False
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
    def recall_ks(self) -> list[int]:
        """Every K of R@K, in ascending order."""
        return sorted({*RECALLS, *self.ks})

    @property
    def embeddings_only(self) -> str | None:
        """Name of the first given option that applies only to embeddings of one model; None without such an option."""
        given = {
            "--ensemble": self.ensemble,
            "--index": self.index,
            "--rerank": self.rerank,
            "--per-query": self.per_query,
            "--trec": self.trec,
            "--k": self.ks,
            "--cxc": self.cxc,
        }
        return next((option for option, value in given.items() if value), None)

    def check(self) -> None:
        """Raise UserError if an option needs another one that is not given, or is out of its range."""
        if self.experiment is not None and not self.ensemble:
            raise UserError("--experiment names the preset of an ensemble and needs --ensemble")
        for option, value in (("--alpha", self.alpha), ("--save", self.save)):
            if value is not None and not self.ensemble:
                raise UserError(f"{option} applies to an ensemble and needs --ensemble")
        if self.index_parameters and not self.index:
            raise UserError("--index-parameters needs an index: name it with --index")
        if self.trec_depth is not None and self.trec is None:
            raise UserError("--trec-depth applies to run files: name their folder with --trec")
        if self.bootstrap and self.bootstrap < _FEWEST_SAMPLES:
            raise UserError(
                f"--bootstrap {self.bootstrap}: an interval needs at least {_FEWEST_SAMPLES} samples; 0 computes no interval"
            )
        depths = [] if self.trec_depth is None else [self.trec_depth]
        cross_checked = ("--cross-checked", [self.cross_checked], 0)
        for option, numbers, low in (
            cross_checked,
            ("--k", self.ks, 1),
            ("--rerank", self.rerank, 1),
            ("--trec-depth", depths, 0),
        ):
            for number in numbers:
                if number < low:
                    raise UserError(f"{option} {number}: must be at least {low}")

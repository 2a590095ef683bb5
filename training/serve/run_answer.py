"""The answer of one run to a query, and the answers of all runs as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vse.eval.search.top_k import Attention, SearchHit


class SplitImage(NamedTuple):
    """An image of the split as a query, which finds similar images."""

    image_id: int


@dataclass(frozen=True)
class RunAnswer:
    """The hits of one run for a query, best first, or an ``error`` message.

    ``n_searched`` : number of images or captions in the searched splits.
    ``name`` : name of the run.
    ``seconds`` : time from the query to the answer.
    ``start`` : number of better results, on earlier pages.
    ``remark`` : message about words that are unknown to the run, or empty.
    ``n_ranked`` : number of items on all pages of results: all searched items, or only the candidates.
    ``n_scored`` : number of items that the model scored pair by pair; None if only vectors were compared.
    ``attends`` : True if attention between the query and the hits can be displayed.
    """

    name: str
    seconds: float
    n_searched: int
    hits: Sequence[SearchHit] = ()
    start: int = 0
    remark: str = ""
    error: str = ""
    n_ranked: int = 0
    n_scored: int | None = None
    attends: bool = False


def build_answer_json(answers: Sequence[RunAnswer], **facts: Any) -> dict[str, Any]:
    """Return the answer of ``/search?as=json``, see ``docs/serve.md``. ``facts`` : fields of the query and of the split."""
    return {**facts, "runs": [_build_run_json(answer) for answer in answers]}


def build_attention_json(attention: Attention) -> dict[str, Any]:
    """Return attention as JSON fields, see ``docs/serve.md``."""
    return {
        "side": attention.direction,
        "score": attention.score,
        "size": list(attention.size),
        "words": list(attention.words),
        "boxes": attention.boxes.tolist(),
        "weights": attention.weights.tolist(),
    }


def _build_run_json(answer: RunAnswer) -> dict[str, Any]:
    hits = [
        {
            "rank": rank,
            "score": hit.score,
            "image": hit.image_id,
            **({} if hit.caption_id is None else {"caption": hit.caption_id}),
            "captions": list(hit.captions),
        }
        for rank, hit in enumerate(answer.hits, answer.start + 1)
    ]
    return {
        "name": answer.name,
        "seconds": round(answer.seconds, 6),
        "searched": answer.n_searched,
        "scored": answer.n_scored,
        "remark": answer.remark,
        "error": answer.error,
        "hits": hits,
    }

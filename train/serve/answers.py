"""What several runs find for a query, as JSON for scripts and as columns for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vse.train.serve.served import RunAnswer, ServedRuns
from vse.train.use.queries import Query

_SHOWN_CAPTIONS = 2  # of an image


def as_json(served: ServedRuns, query: Query, answers: Sequence[RunAnswer]) -> dict[str, Any]:
    """The answer of ``/search?as=json``, see ``docs/serve.md``."""
    asked = {"query": query} if isinstance(query, str) else {"photo": {"width": query.width, "height": query.height}}
    return {**asked, "dataset": served.dataset.name, "split": served.split, "runs": [_run_json(one) for one in answers]}


def columns(served: ServedRuns, answers: Sequence[RunAnswer], by_photo: bool) -> list[dict[str, Any]]:
    """A column for each run: its hits as cards, with their ranks in the other runs."""
    ranks = [{_identity(hit): rank for rank, hit in enumerate(one.hits, 1)} for one in answers]
    made = []
    for number, (run, answer) in enumerate(zip(served.runs, answers, strict=True)):
        cards = []
        for rank, hit in enumerate(answer.hits, 1):
            elsewhere = [
                (served.runs[other].name, of_other[_identity(hit)])
                for other, of_other in enumerate(ranks)
                if other != number and _identity(hit) in of_other
            ]
            cards.append(
                {
                    "rank": rank,
                    "score": f"{hit.score:.4f}".replace("-", "−"),
                    "hit": _identity(hit),
                    "image": hit.image_id,
                    "photo": served.dataset.pictures,
                    "name": hit.photo.name if hit.photo else f"image {hit.image_id}",
                    "captions": hit.captions[:_SHOWN_CAPTIONS],
                    "elsewhere": elsewhere,
                }
            )
        made.append({"answer": answer, "cards": cards, "number": number, "attends": run.attends, "by_photo": by_photo})
    return made


def _run_json(answer: RunAnswer) -> dict[str, Any]:
    hits = [
        {
            "rank": rank,
            "score": hit.score,
            "image": hit.image_id,
            **({} if hit.caption_id is None else {"caption": hit.caption_id}),
            "captions": list(hit.captions),
        }
        for rank, hit in enumerate(answer.hits, 1)
    ]
    return {
        "name": answer.name,
        "seconds": round(answer.seconds, 6),
        "searched": answer.searched,
        "scored": answer.scored,
        "remark": answer.remark,
        "error": answer.error,
        "hits": hits,
    }


def _identity(hit: Any) -> int:
    """The id of what was found: a caption's or an image's."""
    return int(hit.image_id if hit.caption_id is None else hit.caption_id)

"""The contents of the search page: its results, its images and the links between pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vse.eval.report.drawings import ATTENTION_EXPLANATIONS, BRACKET_NOTE, draw_attention
from vse.eval.report.pages import jpeg_source, small_jpeg
from vse.eval.search.top_k import Attention, SearchHit
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.dataset.dataset import Image as DatasetImage
from vse.training.serve.page_request import ItemKind, PageRequest
from vse.training.serve.photos import SMALL_PHOTO_SIDE
from vse.training.serve.run_answer import RunAnswer, SplitImage
from vse.training.use.model import Query

_CAPTIONS_PER_IMAGE = 2


def build_results(
    dataset: Dataset, request: PageRequest, query: Query | SplitImage, answers: Sequence[RunAnswer], has_captions: bool
) -> dict[str, Any]:
    """Return the fields of the page with the results of a query: heading, a column for each run, links to other pages.

    ``has_captions`` : True if captions can be found, so that a photo has a choice between captions and images.
    """
    has_more = request.start + request.k < max(answer.n_ranked for answer in answers)
    return {
        **_build_heading(dataset, request, query, has_captions),
        "finds": request.finds,
        "page": request.page,
        "columns": _build_columns(dataset, request, answers),
        "previous": request.turn_to(request.page - 1) if request.page > 1 else "",
        "next": request.turn_to(request.page + 1) if has_more else "",
    }


def build_attention(query: Query, attention: Attention, run_name: str, hit_id: int) -> dict[str, Any]:
    """Return the fields of a photo with drawn attention: the image ``hit_id`` for a text, or else the photo that was sent."""
    source = f"/photo/{hit_id}/large" if isinstance(query, str) else jpeg_source(small_jpeg(query, SMALL_PHOTO_SIDE))
    return {
        "drawing": draw_attention("look", [attention]),
        "source": source,
        "explanation": ATTENTION_EXPLANATIONS[attention.direction],
        "brackets": BRACKET_NOTE,
        "run": run_name,
    }


def build_image(dataset: Dataset, image: DatasetImage) -> dict[str, Any]:
    """Return the fields of the page of an image with all its captions."""
    return {
        "id": image.imgid,
        "photo": dataset.has_image_files,
        "name": image.file,
        "split": image.split,
        "captions": [caption.raw for caption in image.captions],
    }


def _build_heading(dataset: Dataset, request: PageRequest, query: Query | SplitImage, has_captions: bool) -> dict[str, Any]:
    """Return the title of the results, the query as text or small photo, and the links to captions or images for a photo."""
    if isinstance(query, str):
        return {"text": query, "title": query, "source": "", "choices": []}
    if isinstance(query, SplitImage):
        image = dataset.find_image(query.image_id)
        name = image.file if image else f"image {query.image_id}"
        source = f"/photo/{query.image_id}" if dataset.has_image_files else ""
        return {"text": "", "title": f"Images like {name}", "source": source, "choices": []}
    names: dict[ItemKind, str] = {"captions": "Captions", "images": "Similar images"}
    choices = [(name, request.find(kind), kind == request.finds) for kind, name in names.items()]
    return {
        "text": "",
        "title": "Captions for your photograph" if request.finds == "captions" else "Images like your photograph",
        "source": jpeg_source(small_jpeg(query, SMALL_PHOTO_SIDE)),
        "choices": choices if has_captions else [],
    }


def _build_columns(dataset: Dataset, request: PageRequest, answers: Sequence[RunAnswer]) -> list[dict[str, Any]]:
    """Return a column of the page for each run, with the hits of the run and their ranks in the other columns."""
    ranks = [{_hit_id(hit): rank for rank, hit in enumerate(answer.hits, answer.start + 1)} for answer in answers]
    columns = []
    for index, answer in enumerate(answers):
        cards = []
        for rank, hit in enumerate(answer.hits, answer.start + 1):
            hit_id = _hit_id(hit)
            elsewhere = [
                (answers[other].name, other_ranks[hit_id])
                for other, other_ranks in enumerate(ranks)
                if other != index and hit_id in other_ranks
            ]
            has_look = answer.attends and dataset.has_image_files
            cards.append(
                {
                    "rank": rank,
                    "score": f"{hit.score:.4f}".replace("-", "−"),
                    "image": hit.image_id,
                    "photo": dataset.has_image_files,
                    "name": hit.photo.name if hit.photo else f"image {hit.image_id}",
                    "captions": hit.captions[:_CAPTIONS_PER_IMAGE],
                    "elsewhere": elsewhere,
                    "look": request.build_address(run=index, hit=hit_id) if has_look else "",
                }
            )
        columns.append({"answer": answer, "cards": cards, "number": index})
    return columns


def _hit_id(hit: SearchHit) -> int:
    return int(hit.image_id if hit.caption_id is None else hit.caption_id)

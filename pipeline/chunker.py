"""Noun phrases of captions that nobody annotated, by a spaCy pipeline; their boxes are not known."""

from __future__ import annotations

import logging
from typing import Any

from vse.pipeline.errors import UserError
from vse.pipeline.extra_packages import extra_package
from vse.pipeline.progress import progress_bar
from vse.pipeline.tokenisers import UNNAMED, tokeniser_named

_BATCH = 1000  # captions that are parsed at once
log = logging.getLogger(__name__)


def with_noun_phrases(content: dict[str, Any], pipeline: str) -> dict[str, Any]:
    """The content of a checked ``dataset.json`` whose captions mark their noun phrases, in place of the phrases they had.

    ``pipeline`` is an installed spaCy package, such as ``en_core_web_sm``, or a folder, with a tagger and a parser. Of what
    it calls noun chunks, *a black dog* and *the snow* in *a black dog in the snow*, pronouns are left out. The captions' own
    tokens are parsed. :class:`UserError` if spaCy or the pipeline is not there, or if it parses no sentences.
    """
    nlp = _loaded(pipeline)
    doc_of = extra_package("spacy.tokens", "--chunker", "chunker").Doc
    sentences = [dict(sentence) for entry in content["images"] for sentence in entry.get("sentences", ())]
    cut = tokeniser_named(content.get("tokeniser", UNNAMED), "dataset.json")
    texts = [sentence["tokens"] if "tokens" in sentence else cut(sentence["raw"]) for sentence in sentences]
    docs = nlp.pipe((doc_of(nlp.vocab, words=words) for words in texts), batch_size=_BATCH)
    n_phrases = n_without = 0
    parsed = progress_bar(docs, desc="noun phrases", total=len(texts), unit="caption")
    for sentence, doc in zip(sentences, parsed, strict=True):
        spans = [(chunk.start, chunk.end) for chunk in doc.noun_chunks if chunk.root.pos_ != "PRON"]
        sentence["phrases"] = [{"first_token": start, "n_tokens": stop - start} for start, stop in spans]
        n_phrases, n_without = n_phrases + len(spans), n_without + (not spans)
    log.info("%d noun phrases in %d captions by %s; %d captions have none", n_phrases, len(texts), pipeline, n_without)
    rest = iter(sentences)
    images = [{**entry, "sentences": [next(rest) for _ in entry.get("sentences", ())]} for entry in content["images"]]
    return {**content, "images": images}


def _loaded(pipeline: str) -> Any:
    spacy = extra_package("spacy", "--chunker", "chunker")
    try:
        nlp = spacy.load(pipeline)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{pipeline}: no spaCy pipeline that can be loaded ({reason}); python -m spacy download en_core_web_sm has one"
        ) from None
    parsed = next(iter(nlp.pipe(["a dog in the snow"])))
    if not parsed.has_annotation("DEP") or not parsed.has_annotation("POS") or parsed.vocab.get_noun_chunks is None:
        raise UserError(f"{pipeline}: marks no noun phrases, for which a spaCy pipeline needs a tagger and a parser")
    return nlp

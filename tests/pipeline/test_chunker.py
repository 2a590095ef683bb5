"""Noun phrases of captions, found by a spaCy pipeline that knows the parses of three sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import Output, succeed
from vse.cli import data_main as main
from vse.pipeline.dataset.dataset import load_dataset_file

PARSED = {  # a caption: its parts of speech, the index of the head of each word, and the dependency labels
    "a black dog runs in the snow": ("DET ADJ NOUN VERB ADP DET NOUN", "2 2 3 3 3 6 4", "det amod nsubj ROOT prep det pobj"),
    "two dogs chase it": ("NUM NOUN VERB PRON", "1 2 2 2", "nummod nsubj ROOT dobj"),
    "running fast": ("VERB ADV", "0 0", "ROOT advmod"),
}


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """The folder of a pipeline with one component, which looks the parses up."""
    import spacy  # seconds, which only these tests need

    def parse(doc: spacy.tokens.Doc) -> spacy.tokens.Doc:
        words = [token.text for token in doc]
        unknown = ("NOUN " * len(doc), "0 " * len(doc), "ROOT " * len(doc))
        pos, heads, deps = (each.split() for each in PARSED.get(" ".join(words), unknown))
        return spacy.tokens.Doc(doc.vocab, words, pos=pos, heads=[int(head) for head in heads], deps=deps)

    spacy.Language.component("known_parses", func=parse)
    nlp = spacy.blank("en")
    nlp.add_pipe("known_parses")
    nlp.to_disk(tmp_path / "pipeline")
    return tmp_path / "pipeline"


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """A data set of two images without image files, captioned with these sentences."""
    raws = list(PARSED)
    images: list[dict[str, Any]] = []
    for imgid, own in enumerate((raws[:2], raws[2:])):
        ids = [10 * imgid + k for k in range(len(own))]
        sentences: list[dict[str, Any]] = [
            {"sentid": sentid, "imgid": imgid, "raw": raw.title() + ".", "tokens": raw.split()}
            for sentid, raw in zip(ids, own, strict=True)
        ]
        sentences[0]["phrases"] = [{"first_token": 0, "n_tokens": 1}]
        images.append({"imgid": imgid, "filename": f"{imgid}.jpg", "split": "test", "sentids": ids, "sentences": sentences})
    path = tmp_path / "plain" / "dataset.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"images": images, "dataset": "plain", "pictures": False}))
    return path


@pytest.mark.nightly
def test_noun_phrases_are_marked_and_pronouns_are_not(pipeline: Path, captions: Path, tmp_path: Path, capsys: Output) -> None:
    succeed(main, "add-phrases", captions, "--chunker", pipeline, "--out", tmp_path / "marked")
    dataset = load_dataset_file(tmp_path / "marked" / "dataset.json")
    marked = [
        [" ".join(caption.tokens[phrase.start : phrase.stop]) for phrase in caption.phrases]
        for image in dataset.images
        for caption in image.captions
    ]
    assert marked == [["a black dog", "the snow"], ["two dogs"], []]
    assert all(
        phrase.truth_box is None for image in dataset.images for caption in image.captions for phrase in caption.phrases
    )
    assert "3 noun phrases in 3 captions" in capsys.readouterr().err
    before, after = (json.loads(path.read_text()) for path in (captions, tmp_path / "marked" / "dataset.json"))
    for content in (before, after):
        content.pop("dataset")
        for entry in content["images"]:
            for sentence in entry["sentences"]:
                sentence.pop("phrases", None)
    assert after == before | {"parent": "plain"}


@pytest.mark.nightly
def test_a_pipeline_that_finds_no_noun_phrases_is_refused(captions: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    out = tmp_path / "marked"
    import spacy  # seconds, which only these tests need

    spacy.blank("en").to_disk(tmp_path / "blank")
    missing = fails(main, "add-phrases", captions, "--chunker", "no_such_pipeline", "--out", out)
    assert "no_such_pipeline: " in missing
    assert "spacy download" in missing
    assert f"{tmp_path / 'blank'}: " in fails(main, "add-phrases", captions, "--chunker", tmp_path / "blank", "--out", out)
    for both in ([], ["--chunker", "x", "--entities", tmp_path]):
        assert "phrases come from --entities FOLDER or from --chunker PIPELINE: give one of them" in fails(
            main, "add-phrases", captions, *both, "--out", out
        )
    assert not out.exists()

"""Settings that do not go together are refused with what is wrong, by the one way in which presets are read."""

from __future__ import annotations

import pytest

from vse.pipeline.config import BranchesConfig, ModelConfig
from vse.pipeline.errors import UserError
from vse.pipeline.presets import load_experiment

CCA = ["solver=cca", "caption_feature=tfidf", "model.branches.layers=linear"]
NEEDS = "solver: cca needs linear model.branches and the cosine similarity"
ONE_SIDE = "loss.lambda3 and lambda4 compare unit vectors, by the cosine or the euclidean similarity"

REFUSED = {
    "branches that do not meet": (
        ["model.branches.layers=nonlinear", "model.branches.image_widths=[9, 4]", "model.branches.caption_widths=[9, 5]"],
        "model.branches: nonlinear branches end in 4 numbers for images and 5 for captions",
    ),
    "first layers that do not meet": (
        ["model.branches.layers=linear", "model.branches.image_widths=[9, 4]", "model.branches.caption_widths=[8, 4]"],
        "model.branches: linear branches end in 9 numbers for images and 8 for captions",
    ),
    "no layer": (["model.branches.image_widths=[]"], "model.branches.image_widths: .* at least 1 item"),
    "a layer of nothing": (["model.branches.image_widths=[0]"], "model.branches.image_widths.0: .* greater than 0"),
    "dropout of everything": (["model.branches.dropout=1"], "model.branches.dropout: .* less than 1"),
    "another kind of layers": (["model.branches.layers=deep"], "model.branches.layers: .* 'linear' or 'nonlinear'"),
    "a distance of vectors of any length": (
        ["model.similarity=euclidean", "model.normalize_image=false"],
        "model: similarity: euclidean takes unit vectors, so normalize_image: true",
    ),
    "another recurrent network": (["model.recurrent=rnn"], "model.recurrent: .* 'gru' or 'lstm'"),
    "no hinge": (["loss.k=0"], "loss.k: .* greater than 0"),
    "a negative weight": (["loss.lambda4=-1"], "loss.lambda4: .* greater than or equal to 0"),
    "constraints among images by order": (["loss.lambda3=0.1", "model.similarity=order"], ONE_SIDE),
    "constraints among captions by a network": (["loss.lambda4=0.1", "model.similarity=network"], ONE_SIDE),
    "constraints among images of any length": (["loss.lambda3=0.1", "model.normalize_image=false"], ONE_SIDE),
    "constraints and a warm-up of single pairs": (
        ["loss.lambda4=0.1", "warmup.loss=logistic", "warmup.epochs=1"],
        "loss.lambda3 and lambda4 go with the ranking losses, not with logistic",
    ),
    "constraints beside single pairs": (
        ["loss.lambda4=0.1", "loss.name=logistic"],
        "loss.lambda3 and lambda4 go with the ranking losses, not with logistic",
    ),
    "cca of deep branches": (CCA[:2], NEEDS),
    "cca by a distance": ([*CCA, "model.similarity=euclidean"], NEEDS),
    "cca of pictures": ([*CCA, "images.source=pictures"], "solver: cca reads cached features and starts from nothing"),
    "cca from a run": ([*CCA, "start_from=vsepp"], "solver: cca reads cached features and starts from nothing"),
    "cca without a regularisation": ([*CCA, "cca.regularization=[]"], "cca.regularization: .* at least 1 item"),
    "cca with a negative one": ([*CCA, "cca.regularization=[-1]"], "cca.regularization.0: .* greater than or equal to 0"),
    "another solver": (["solver=adam"], "solver: .* 'gradient' or 'cca'"),
    "a misspelt group": (["model.branches.layer=linear"], "did you mean 'model.branches.layers'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_in_one_line(name: str) -> None:
    sets, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as refusal:
        load_experiment("vsepp", sets=sets)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "sets",
    [
        ["model.branches.image_widths=[9, 4]", "model.branches.caption_widths=[9, 5]"],  # which are not used
        ["model.branches.layers=linear", "model.branches.image_widths=[9, 4]", "model.branches.caption_widths=[9, 5]"],
        ["model.branches.layers=nonlinear", "model.branches.image_widths=[4]", "model.branches.caption_widths=[9, 5, 4]"],
        ["model.similarity=euclidean", "loss.lambda3=0.1", "loss.lambda4=0.1"],
        ["loss.k=null"],
        CCA,
    ],
)
def test_what_goes_together_is_taken(sets: list[str]) -> None:
    load_experiment("vsepp", sets=sets)


def test_an_embedding_is_as_long_as_the_branches_say() -> None:
    widths = {"image_widths": [9, 4], "caption_widths": [9, 8, 4]}
    lengths = [ModelConfig(dim=7, branches=BranchesConfig(layers=n, **widths)).embedding_dim for n in ("none", "nonlinear")]
    assert lengths == [7, 4]
    assert ModelConfig(dim=7, branches=BranchesConfig(layers="linear", **widths)).embedding_dim == 9


def test_unit_vectors_are_ranked_by_their_cosine() -> None:
    found = [ModelConfig(similarity=name).ranked_by for name in ("cosine", "euclidean", "order")]
    assert found == ["cosine", "cosine", "order"]

"""The whole loss of a batch against loops written from the two-branch paper's equations and from its authors' code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vse.pipeline.config import LossConfig, ModelConfig
from vse.train.losses import LOSSES
from vse.train.losses.objective import Batch, Cost, Objective, balanced_pairs, related
from vse.train.models.build import TwoBranchModel

DIM = 4
Distance = Callable[[Tensor, Tensor], Tensor]


class Made:
    """Pairs of images with some captions each, in any order; unit vectors whose gradients can be taken.

    ``texts`` numbers what the captions say; without it each says something else.
    """

    def __init__(self, counts: Sequence[int], seed: int = 0, n_texts: int | None = None) -> None:
        chance, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.image_of = chance.permutation(np.repeat(np.arange(len(counts)), counts))
        n = len(self.image_of)
        self.text_of = np.arange(n) if n_texts is None else chance.integers(n_texts, size=n)
        self.images, self.captions = (
            torch.nn.functional.normalize(torch.randn(m, DIM, generator=generator, dtype=torch.float64)).requires_grad_()
            for m in (len(counts), n)
        )

    def batch(self) -> Batch:
        return Batch(self.images[torch.from_numpy(self.image_of)], self.captions, self.image_of, self.text_of)

    def with_gradients(self, loss: Tensor) -> list[Tensor]:
        return [loss, *torch.autograd.grad(loss, [self.images, self.captions], materialize_grads=True)]


def model(similarity: Any = "euclidean", floor: float = 0.0) -> TwoBranchModel:
    torch.manual_seed(0)
    return TwoBranchModel(ModelConfig(dim=DIM, similarity=similarity, distance_floor=floor, network_widths=[5, 3]), 6, 10)


def cost(made: Made, loss: LossConfig, similarity: str = "euclidean", floor: float = 0.0) -> Cost:
    return Objective(loss.name, loss, model(similarity, floor))(made.batch(), 0)


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum().sqrt()


def floored(a: Tensor, b: Tensor) -> Tensor:
    """What the authors' code calls the distance."""
    return (a.square().sum() - 2 * (a * b).sum() + b.square().sum() + 1e-4).sqrt()


def one_minus_cosine(a: Tensor, b: Tensor) -> Tensor:
    return 1 - (a * b).sum()


def top(hinges: list[Tensor], k: int | None) -> list[Tensor]:
    """The highest ``k`` of some numbers."""
    return sorted(hinges, key=Tensor.item, reverse=True)[:k]


def triplets(query: Tensor, positive: Tensor, negatives: list[Tensor], d: Distance, loss: LossConfig) -> Tensor:
    """Sum of the k highest [m + d(query, positive) - d(query, negative)]+."""
    hinges = [torch.relu(loss.margin + d(query, positive) - d(query, negative)) for negative in negatives]
    return sum(top(hinges, loss.k), start=0 * query.sum())


def slow_ranking(made: Made, d: Distance, loss: LossConfig) -> Tensor:
    """Eq. 3: for each right pair, wrong captions of its image, and wrong images, each once, of its caption."""
    total = 0 * made.captions.sum()
    for i, own in enumerate(made.image_of):
        wrong_captions = [made.captions[j] for j, other in enumerate(made.image_of) if other != own]
        wrong_images = [made.images[j] for j in range(len(made.images)) if j != own]
        image, caption = made.images[own], made.captions[i]
        total = total + loss.lambda1 * triplets(image, caption, wrong_captions, d, loss)
        total = total + loss.lambda2 * triplets(caption, image, wrong_images, d, loss)
    return total


def slow_image_constraints(made: Made, d: Distance, loss: LossConfig) -> Tensor:
    """Eq. 4: N(x) is the images that some text of the batch describes too."""
    said = [set(made.text_of[made.image_of == image].tolist()) for image in range(len(made.images))]
    total = 0 * made.images.sum()
    for i in range(len(made.images)):
        outside = [made.images[j] for j in range(len(made.images)) if not said[i] & said[j]]
        for j in range(len(made.images)):
            if j != i and said[i] & said[j]:
                total = total + triplets(made.images[i], made.images[j], outside, d, loss)
    return total


def slow_caption_constraints(made: Made, d: Distance, loss: LossConfig) -> Tensor:
    """Eq. 5: N(y) is the other captions of the same image."""
    total = 0 * made.captions.sum()
    for i, own in enumerate(made.image_of):
        outside = [made.captions[j] for j, other in enumerate(made.image_of) if other != own]
        for j, other in enumerate(made.image_of):
            if j != i and other == own:
                total = total + triplets(made.captions[i], made.captions[j], outside, d, loss)
    return total


def slow_paper(made: Made, d: Distance, loss: LossConfig) -> Tensor:
    """Eq. 6."""
    of_images, of_captions = slow_image_constraints(made, d, loss), slow_caption_constraints(made, d, loss)
    return slow_ranking(made, d, loss) + loss.lambda3 * of_images + loss.lambda4 * of_captions


DISTANCES = [("euclidean", 0.0, euclidean), ("euclidean", 1e-4, floored), ("cosine", 0.0, one_minus_cosine)]
COUNTS = [[1, 2, 3, 4], [2, 2, 2, 2, 2], [1, 1, 1], [4, 1], [3]]
WEIGHTS = {
    "both directions": {"lambda1": 1.0, "lambda2": 1.5},
    "captions for an image": {"lambda1": 1.0, "lambda2": 0.0},
    "images for a caption": {"lambda1": 0.0, "lambda2": 0.7},
    "constraints among captions": {"lambda2": 1.5, "lambda4": 0.05},
    "constraints among images": {"lambda1": 0.0, "lambda2": 0.0, "lambda3": 2.0},
    "all": {"lambda1": 0.9, "lambda2": 1.5, "lambda3": 0.3, "lambda4": 0.2},
}


@pytest.mark.parametrize("k", [1, 2, 10, None])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("similarity", "floor", "d"), DISTANCES, ids=["euclidean", "with a floor", "cosine"])
def test_the_loss_and_its_gradients_are_those_of_the_paper(
    similarity: str, floor: float, d: Distance, weights: str, k: int | None
) -> None:
    loss = LossConfig(name="top", margin=0.4, k=k, same_image="mask", **WEIGHTS[weights])
    for seed, counts in enumerate(COUNTS):
        made = Made(counts, seed, n_texts=5)
        found, slow = cost(made, loss, similarity, floor).loss, slow_paper(made, d, loss)
        torch.testing.assert_close(made.with_gradients(found), made.with_gradients(slow))


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    k=st.one_of(st.none(), st.integers(1, 12)),
    margin=st.floats(0, 2),
    lambdas=st.tuples(*[st.floats(0, 3)] * 4),
    n_texts=st.integers(1, 12),
)
def test_any_batch_costs_what_the_paper_says(
    counts: list[int], seed: int, k: int | None, margin: float, lambdas: tuple[float, ...], n_texts: int
) -> None:
    weights = {f"lambda{number}": weight for number, weight in enumerate(lambdas, 1)}
    loss = LossConfig(name="top", margin=margin, k=k, same_image="mask", **weights)
    made = Made(counts, seed, n_texts)
    torch.testing.assert_close(cost(made, loss).loss, slow_paper(made, euclidean, loss))


@pytest.mark.parametrize("same_image", ["keep", "mask"])
@pytest.mark.parametrize("name", ["max", "sum", "top", "spectrum", "infonce"])
def test_every_ranking_loss_takes_constraints(name: str, same_image: str) -> None:
    loss = LossConfig(name=name, same_image=same_image, lambda4=0.5, lambda3=0.25)
    made = Made([2, 3, 1, 2], 1, n_texts=4)
    scores = made.batch().images @ made.captions.T
    image_of = made.image_of
    negatives = image_of[:, None] != image_of[None] if same_image == "mask" else ~np.eye(len(image_of), dtype=bool)
    alone = LOSSES[name](scores, torch.from_numpy(negatives), loss)
    slow = 0.25 * slow_image_constraints(made, one_minus_cosine, loss)
    slow = slow + 0.5 * slow_caption_constraints(made, one_minus_cosine, loss) + alone
    torch.testing.assert_close(made.with_gradients(cost(made, loss, "cosine").loss), made.with_gradients(slow))


def authors_loss(made: Made, margin: float, k: int, factors: tuple[float, float, float]) -> Tensor:
    """The loss of retrieval_model.py of the authors' code: B images with two sentences each.

    Means over the k highest hinges of each sentence, be they 0 or not: of wrong images, of wrong sentences of its image, and
    of wrong sentences of the sentence, whose positive is the farthest sentence of its image, itself included.
    """
    im_loss, sent_loss, sent_only_loss = [], [], []
    for a, own in enumerate(made.image_of):
        image, sentence = made.images[own], made.captions[a]
        wrong_images = [made.images[j] for j in range(len(made.images)) if j != own]
        wrong = [made.captions[b] for b, other in enumerate(made.image_of) if other != own]
        right = floored(sentence, image)
        im_loss += top([torch.relu(margin + right - floored(sentence, other)) for other in wrong_images], k)
        sent_loss += top([torch.relu(margin + right - floored(image, other)) for other in wrong], k)
        farthest = torch.stack(
            [floored(sentence, made.captions[b]) for b, other in enumerate(made.image_of) if other == own]
        ).max()
        sent_only_loss += top([torch.relu(margin + farthest - floored(sentence, other)) for other in wrong], k)
    parts = (torch.stack(part).mean() for part in (im_loss, sent_loss, sent_only_loss))
    return sum((factor * part for factor, part in zip(factors, parts, strict=True)), start=torch.zeros(()).double())


@pytest.mark.parametrize("margin", [0.05, 0.6], ids=["many hinges of 0", "few hinges of 0"])
@pytest.mark.parametrize("factors", [(1.5, 1.0, 0.05), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_the_reduction_mean_topk_is_the_authors_code(factors: tuple[float, float, float], margin: float) -> None:
    lambda2, lambda1, lambda4 = factors  # the authors' factor of images weighs the hinges whose query is a sentence
    weights = {"lambda1": lambda1, "lambda2": lambda2, "lambda4": lambda4}
    loss = LossConfig(name="top", margin=margin, k=10, reduction="mean_topk", same_image="mask", **weights)
    made = Made([2] * 13, 3)
    found, slow = cost(made, loss, floor=1e-4).loss, authors_loss(made, margin, 10, factors)
    assert slow > 0
    torch.testing.assert_close(made.with_gradients(found), made.with_gradients(slow))


def test_the_sentence_itself_is_the_positive_of_one_that_is_alone() -> None:
    loss = LossConfig(name="top", margin=2, k=2, reduction="mean_topk", lambda1=0, lambda2=0, lambda4=1, same_image="mask")
    made = Made([1, 1, 2, 1], 2)
    found, slow = cost(made, loss, floor=1e-4).loss, authors_loss(made, 2, 2, (0, 0, 1))
    assert slow > 0
    torch.testing.assert_close(made.with_gradients(found), made.with_gradients(slow))


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 7), seed=st.integers(0, 10**6), margin=st.floats(0, 2), lambdas=st.tuples(*[st.floats(0, 2)] * 2))
def test_with_all_hinges_and_one_minus_the_cosine_it_is_the_loss_of_vse0(
    n: int, seed: int, margin: float, lambdas: tuple[float, float]
) -> None:
    weights = {"lambda1": lambdas[0], "lambda2": lambdas[1], "lambda3": 0, "lambda4": 0}
    made = Made([1] * n, seed)
    found, vse0 = (
        cost(made, LossConfig(name=name, margin=margin, k=None, same_image=same_image, **weights), "cosine").loss
        for name, same_image in (("top", "mask"), ("sum", "keep"))
    )
    torch.testing.assert_close(made.with_gradients(found), made.with_gradients(vse0))


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    margin=st.floats(0, 2),
    lambdas=st.tuples(*[st.floats(0, 2)] * 2),
)
def test_so_it_is_if_captions_of_the_same_image_count_as_negatives(
    counts: list[int], seed: int, margin: float, lambdas: tuple[float, float]
) -> None:
    made, settings_ = Made(counts, seed), {"margin": margin, "k": None, "lambda1": lambdas[0], "lambda2": lambdas[1]}
    found, vse0 = (cost(made, LossConfig(name=name, **settings_), "cosine").loss for name in ("top", "sum"))
    torch.testing.assert_close(made.with_gradients(found), made.with_gradients(vse0))


@pytest.mark.parametrize("reduction", ["sum", "mean_topk"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_cost_knows_what_it_would_be_if_all_embeddings_were_alike(name: str, reduction: str) -> None:
    loss = LossConfig(name=name, reduction=reduction, k=3, same_image="mask", lambda2=1.5, lambda3=0.3, lambda4=0.2)
    made = Made([1, 2, 3, 2], n_texts=4)
    with torch.no_grad():
        made.images[:] = made.captions[:] = torch.tensor([1.0, 0, 0, 0])
    found = cost(made, loss)
    assert found.collapsed_loss > 0
    torch.testing.assert_close(found.loss, found.collapsed_loss)


@pytest.mark.parametrize(("counts", "reduction"), [([1, 1, 1], "sum"), ([4], "sum"), ([4], "mean_topk")])
def test_a_query_without_a_neighbour_or_without_anything_outside_costs_nothing(counts: list[int], reduction: Any) -> None:
    loss = LossConfig(name="top", margin=2, reduction=reduction, lambda1=0, lambda2=0, lambda4=1, same_image="mask")
    made = Made(counts)
    assert not any(part.any() for part in made.with_gradients(cost(made, loss).loss))


def slow_related(own: list[int], others: list[int]) -> tuple[list[int], list[list[bool]], list[list[bool]]]:
    items = sorted(set(own))
    partners = [{other for one, other in zip(own, others, strict=True) if one == item} for item in items]
    share = [[bool(a & b) for b in partners] for a in partners]
    neighbours = [[share[i][j] and i != j for j in range(len(items))] for i in range(len(items))]
    return [own.index(item) for item in items], neighbours, [[not one for one in row] for row in share]


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_what_shares_a_partner_is_related(pairs: list[tuple[int, int]]) -> None:
    own, others = ([pair[side] for pair in pairs] for side in (0, 1))
    found = related(torch.tensor(own), torch.tensor(others))
    assert tuple(part.tolist() for part in found) == slow_related(own, others)


def slow_network(network: Any, image: Tensor, caption: Tensor) -> Tensor:
    """Layer by layer, number by number."""
    vector = [v * c for v, c in zip(image, caption, strict=True)]
    for number, layer in enumerate(network.linears):
        vector = [
            sum((w * x for w, x in zip(row, vector, strict=True)), start=bias)
            for row, bias in zip(layer.weight, layer.bias, strict=True)
        ]
        vector = [torch.relu(x) for x in vector] if number < len(network.linears) - 1 else vector
    return vector[0]


@pytest.mark.parametrize("counts", COUNTS)
def test_the_logistic_loss_of_a_network_equals_a_loop_over_its_pairs(counts: list[int]) -> None:
    """Eq. 7, of each right pair, and of its image with a caption of another image."""
    made, network = Made(counts), model("network")
    made.images, made.captions = (side.detach().float().requires_grad_() for side in (made.images, made.captions))
    parameters = [made.images, made.captions, *network.similarity.parameters()]
    for seed in range(3):
        found = Objective("logistic", LossConfig(name="logistic"), network)(made.batch(), seed)
        rows, columns = balanced_pairs(made.image_of, np.random.default_rng(seed))
        slow = 0 * made.captions.sum()
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            z = 1 if row == column else -1
            p = slow_network(network.similarity, made.images[made.image_of[row]], made.captions[column])
            slow = slow + torch.log(1 + torch.exp(-z * p))
        assert found.scores is None
        torch.testing.assert_close(found.loss, slow)
        assert found.collapsed_loss.item() == pytest.approx(len(rows) * np.log(2))
        found_gradients, slow_gradients = (
            torch.autograd.grad(loss, parameters, materialize_grads=True) for loss in (found.loss, slow)
        )
        torch.testing.assert_close(found_gradients, slow_gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("similarity", ["cosine", "euclidean", "order"])
def test_any_similarity_can_be_taught_single_pairs(similarity: str) -> None:
    made = Made([2, 3, 1])
    found = Objective("logistic", LossConfig(name="logistic"), model(similarity))(made.batch(), 4)
    rows, columns = balanced_pairs(made.image_of, np.random.default_rng(4))
    scores = model(similarity).similarity(made.batch().images, made.captions)[rows, columns]
    labels = torch.where(torch.from_numpy(rows == columns), 1.0, -1.0)
    torch.testing.assert_close(found.loss, torch.log(1 + torch.exp(-labels * scores)).sum(), check_dtype=False)


@st.composite
def image_numbers(draw: st.DrawFn) -> np.ndarray:
    counts = draw(st.lists(st.integers(1, 6), min_size=2, max_size=9))
    return np.random.default_rng(draw(st.integers(0, 99))).permutation(np.repeat(5 * np.arange(len(counts)), counts))


@settings(deadline=None)
@given(image_of=image_numbers(), seed=st.integers(0, 99))
def test_there_is_a_wrong_pair_for_each_right_one(image_of: np.ndarray, seed: int) -> None:
    rows, columns = balanced_pairs(image_of, np.random.default_rng(seed))
    n = len(image_of)
    assert rows.tolist() == [*range(n), *range(n)]
    assert columns[:n].tolist() == list(range(n))
    assert (image_of[rows[n:]] != image_of[columns[n:]]).all(), "never another caption of the same image"


def test_every_caption_of_another_image_is_as_likely() -> None:
    image_of = np.asarray([7, 2, 7, 2, 2, 9, 7, 4])
    chance, n_draws = np.random.default_rng(0), 2000
    found = Counter[tuple[int, int]]()
    for _ in range(n_draws):
        rows, columns = (side[len(image_of) :].tolist() for side in balanced_pairs(image_of, chance))
        found.update(zip(rows, columns, strict=True))
    for row, own in enumerate(image_of):
        wrong = np.flatnonzero(image_of != own)
        expected = n_draws / len(wrong)
        counts = [found.pop((row, int(column))) for column in wrong]
        assert sum((count - expected) ** 2 / expected for count in counts) < 26, "chi square of 6 at most: 2 in 10,000"
    assert not found


def test_a_batch_of_one_image_has_no_pairs_and_costs_nothing() -> None:
    rows, columns = balanced_pairs(np.asarray([3, 3, 3]), np.random.default_rng(0))
    assert len(rows) == len(columns) == 0
    made = Made([3])
    found = Objective("logistic", LossConfig(name="logistic"), model("network").double())(made.batch(), 0)
    assert found.loss.item() == found.collapsed_loss.item() == 0
    assert not any(part.any() for part in made.with_gradients(found.loss))

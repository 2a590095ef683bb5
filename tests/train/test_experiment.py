"""Experiments as the presets and ``--set`` make them; settings that do not go together are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import known_presets, list_changes, load_plan
from vse.train.experiment import load_experiment

CCA = ["solver=cca", "model.image_encoder=branch", "model.image_encoder.widths=[4]", "caption_feature=tfidf"]
ALONE = "solver: cca reads cached features only and cannot start from a run"
ONE_SIDE = "loss.lambda3 and lambda4 compare unit vectors of one side"
PAIRS = "loss.lambda3 and lambda4 require a ranking loss, not logistic"

REFUSED = {
    "no layer": (
        ["model.image_encoder=branch", "model.image_encoder.widths=[]"],
        "model.image_encoder.widths: .* at least 1 item",
    ),
    "a layer of nothing": (
        ["model.image_encoder=branch", "model.image_encoder.widths=[0]"],
        "model.image_encoder.widths.0: .* greater than 0",
    ),
    "dropout of everything": (
        ["model.caption_encoder=branch", "model.caption_encoder.dropout=1"],
        "model.caption_encoder.dropout: .* less than 1",
    ),
    "dropout of everything in a head": (
        ["model.caption_encoder=lstm", "model.caption_encoder.head.dropout=1"],
        "model.caption_encoder.head.dropout: .* less than 1",
    ),
    "layers of a linear map": (["model.image_encoder.widths=[4]"], "unknown setting 'model.image_encoder.widths'"),
    "settings of an encoder without its name": (
        ["model.caption_encoder.head=null"],
        "model.caption_encoder: the caption encoder is a name .gru, lstm.*, or settings with its name",
    ),
    "an unknown encoder": (["model.caption_encoder=grru"], "model.caption_encoder: unknown caption encoder 'grru' .* 'gru'"),
    "an unknown similarity": (["model.similarity=ordr"], "model.similarity: unknown similarity 'ordr' .did you mean 'order'"),
    "an unknown loss": (["loss=maxx"], "loss: unknown loss 'maxx' .did you mean 'max'"),
    "a temperature without a use": (["loss.temperature=1"], "unknown setting 'loss.temperature'"),
    "a distance of vectors of any length": (
        ["model.similarity=euclidean", "model.normalize_image=false"],
        "model: similarity: euclidean takes unit vectors, so normalize_image: true",
    ),
    "no hinge": (["loss.k=0"], "loss.k: .* greater than 0"),
    "a negative weight": (["loss.lambda4=-1"], "loss.lambda4: .* greater than or equal to 0"),
    "constraints among images by order": (["loss.lambda3=0.1", "model.similarity=order"], ONE_SIDE),
    "constraints among captions by a network": (["loss.lambda4=0.1", "model.similarity=network"], ONE_SIDE),
    "constraints among images of any length": (["loss.lambda3=0.1", "model.normalize_image=false"], ONE_SIDE),
    "constraints and a warm-up of single pairs": (["loss.lambda4=0.1", "warmup.loss=logistic", "warmup.epochs=1"], PAIRS),
    "constraints beside single pairs": (["loss.lambda4=0.1", "loss.name=logistic"], PAIRS),
    "cca of photos": ([*CCA, "images.source=pictures"], ALONE),
    "cca from a run": ([*CCA, "start_from=vsepp"], ALONE),
    "cca without a regularisation": ([*CCA, "solver.regularization=[]"], "solver.regularization: .* at least 1 item"),
    "cca with a negative one": (
        [*CCA, "solver.regularization=[-1]"],
        "solver.regularization.0: .* greater than or equal to 0",
    ),
    "an optimiser that is not there": (["train.optimizer=sgd"], "train.optimizer: Input should be 'adam' or 'adamw'"),
    "a running mean of nothing": (["train.ema=1"], "train.ema: .* less than 1"),
    "weights that are not there": (["train.undecayed=[bias]"], "train.undecayed.0: Input should be 'words', 'embeddings'"),
    "an adversary and an update for several batches": (
        ["adversary=ace", "train.accumulate=2"],
        "an adversary takes a step for each batch, so it requires train.accumulate: 1",
    ),
    "another solver": (["solver=adam"], "solver: unknown solver 'adam'"),
    "a misspelt setting": (["loss.margn=1"], "^unknown setting 'loss.margn' .did you mean 'loss.margin'"),
    "a wrong value": (["loss.same_image=drop"], "loss.same_image: Input should be 'keep', 'mask' or 'positive'"),
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
        ["model.image_encoder={name: branch, widths: [4]}", "model.caption_encoder={name: gru, head: {widths: [9, 5, 4]}}"],
        ["model.similarity=euclidean", "loss.lambda3=0.1", "loss.lambda4=0.1"],
        ["loss.k=null"],
        CCA,
    ],
)
def test_what_goes_together_is_taken(sets: list[str]) -> None:
    load_experiment("vsepp", sets=sets)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.recurrent", "model.caption_encoder.name"),
        ("model.branches.layers", "model.image_encoder.name and model.caption_encoder.name"),
        ("model.branches.image_widths", "model.image_encoder.widths"),
        ("model.branches.dropout", "model.image_encoder.dropout and model.caption_encoder.dropout"),
        ("model.order_form", "model.similarity.form"),
        ("model.distance_floor", "model.similarity.floor"),
        ("model.network_widths", "model.similarity.widths"),
        ("cca.power", "solver.power"),
    ],
)
def test_an_old_name_of_a_setting_is_answered_with_the_new_one(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{old} is now {new}$"):
        load_experiment("vsepp", sets=[f"{old}=1"])
    group, _, key = old.partition(".")
    (tmp_path / "mine.yaml").write_text(f"{group}: {{ {key.replace('.', ': { ')}: 1 {'}' * key.count('.')} }}")
    with pytest.raises(UserError, match="^experiment '.*mine.yaml': .* is now "):
        load_experiment(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("dataset", [None, *known_presets("datasets")])
def test_every_experiment_is_valid_on_every_data_set(dataset: str | None) -> None:
    for name in known_presets("experiments"):
        if not load_plan(name, dataset).ensemble_of:
            assert load_experiment(name, dataset).name == name


def test_an_ensemble_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "duo.yaml").write_text("ensemble_of: [vsepp, vse0]")
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    with pytest.raises(UserError, match=r"^duo is an ensemble: train vsepp and vse0, then average .* --experiment duo$"):
        load_experiment("duo", "demo", ["train.epochs=1"])
    with pytest.raises(UserError, match=r"^unknown setting 'ensemble_of'"):
        load_experiment("vsepp", sets=["ensemble_of=[vse0, vsepp]"])


def test_vsepp_is_the_paper_s() -> None:
    config = load_experiment("vsepp")
    assert (config.loss.name, config.loss.margin, config.loss.same_image, config.warmup.epochs) == ("max", 0.2, "keep", 0)
    assert (config.model.dim, config.model.word_dim, config.model.normalize_image) == (1024, 300, True)
    assert (config.model.image_encoder.name, config.model.caption_encoder, config.model.similarity.name) == (
        "linear",
        None,
        "cosine",
    )
    train = config.train
    assert (train.epochs, train.batch_size, train.learning_rate, train.decay_after, train.decay) == (30, 128, 2e-4, 15, 0.1)
    assert (train.clip, train.min_count, train.precision) == (2.0, 4, "fp32")


def test_vse0_differs_from_vsepp_in_two_settings() -> None:
    changes = list_changes(load_experiment("vsepp").content(), load_experiment("vse0").content())
    only_of_max = "loss.mirrored_positive: False -> None"
    assert changes == [only_of_max, "loss.name: max -> sum", "model.normalize_image: True -> False", "name: vsepp -> vse0"]


def test_a_setting_is_read_as_yaml() -> None:
    config = load_experiment("vsepp", sets=["loss.margin=0.1", "train.learning_rate=2e-3", "loss.same_image=mask"])
    assert (config.loss.margin, config.train.learning_rate, config.loss.same_image) == (0.1, 2e-3, "mask")


def test_another_part_keeps_the_settings_that_it_shares_with_the_one_before() -> None:
    loss = load_experiment("infonce", sets=["loss.margin=0.1", "loss.lambda2=0.5", "loss=sum"]).loss
    assert (loss.name, loss.margin, loss.lambda2) == ("sum", 0.1, 0.5)
    assert load_experiment("orderpp_effnet_10c").model.similarity.model_dump() == {"name": "order", "form": "norm"}


def test_the_demo_takes_the_dropout_of_two_branch_networks_away() -> None:
    fisher, lstm, variant = (
        load_experiment(name, "demo").model for name in ("twobranch", "twobranch_lstm", "twobranch_effnet")
    )
    encoders = [model.model_dump()[side] for model in (fisher, variant) for side in ("image_encoder", "caption_encoder")]
    assert [encoder["dropout"] for encoder in encoders] == [0.0, 0.0, 0.5, 0.5]
    assert lstm.model_dump()["image_encoder"]["dropout"] == lstm.model_dump()["caption_encoder"]["head"]["dropout"] == 0.0


def test_a_preset_by_path_may_extend_one_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: vse0\nloss: {margin: 0.3}\n")
    config = load_experiment(str(path))
    assert (config.name, config.loss.name, config.loss.margin) == ("mine", "sum", 0.3)


def test_no_part_waits_if_frozen_is_set_to_an_empty_dictionary() -> None:
    assert load_experiment("dsve_effnet").train.frozen
    assert load_experiment("dsve_effnet", None, ["train.frozen={}"]).train.frozen == {}
    only = load_experiment("dsve_effnet", None, ["train.frozen={image_encoder: 1}"])
    assert only.train.frozen == {"image_encoder": 1}

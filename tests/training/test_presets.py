from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torchvision.models import resnet18

from tests.features.tiny_text import CLIP, add_tiny_clip
from vse.features.backbones.networks import TruncatedNetwork
from vse.features.exchange.embeddings import build_cache_paths
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.boxes import BoxesExtractor
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder
from vse.features.extractors.cnn import CnnExtractor
from vse.features.extractors.text import TextExtractor
from vse.features.settings import load_feature_preset
from vse.features.settings.base import Extractor
from vse.features.settings.captions import TextConfig
from vse.features.settings.images import BoxesConfig, CnnConfig, RegionsConfig
from vse.pipeline.presets import presets
from vse.pipeline.presets.preset_files import list_preset_names_and_descriptions
from vse.pipeline.presets.presets import list_setting_changes
from vse.training.data.samplers import SAMPLERS
from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.losses.hinges import MaxOfHinges
from vse.training.models.encoders.bert import BertSettings
from vse.training.models.encoders.linear import BranchSettings, DenseLayersSettings
from vse.training.models.encoders.pooling import GpoSettings, WeldonSettings
from vse.training.models.encoders.recurrent import GruSettings, LstmSettings, SruSettings
from vse.training.phrases.solvers import PhraseGradientSettings
from vse.training.run.folder import RunFolder
from vse.training.solvers.cca import CommonCcaSettings
from vse.training.solvers.closed_form import AsifSettings, CsaSettings, NoTrainingSettings, RidgeSettings
from vse.training.training import train
from vse.training.use.embed import cache_run_embeddings

EXPERIMENTS = sorted(name for name, _ in list_preset_names_and_descriptions("experiments", "ensemble_of"))  # what is trained

# Tables 1 to 4 of the VSE++ paper: the rows of VSE0, VSE++, Order0 and Order++, not those of other people's models. Tables 2
# to 4 of the two-branch paper: CCA, the embedding networks, and the similarity network.
ROWS = [
    *(f"vsepp 1.{row}" for row in (6, 7, 8, 9, 10, 11, 13, 14)),
    *(f"vsepp 2.{row}" for row in (1, 2, 3, 4, 5, 6)),
    *(f"vsepp 3.{row}" for row in range(8, 18)),
    *(f"vsepp 4.{row}" for row in (2, 3, 4, 5)),
    *(f"twobranch 2.{row}" for row in ("a4", "a5", "a6", "a7", "b1", "b2", "b3", "b4", "b5", "b6", "c1", "d1")),
    *(f"twobranch 3.{row}" for row in ("a1", "a2", "a3", "b1", "b2", "b3", "c1", "d1")),
    *(f"twobranch 4.{row}" for row in ("f1", "f2", "f3", "c1", "c2", "c3")),
    *(f"twobranch 1.{row}" for row in ("a1", "b1", "b2", "b3", "b4", "b5", "b6", "c1", "c2", "c3", "c4", "fc1", "fc2")),
    # The same models in other tables.
    "twobranch 5.1",
    "twobranch 5.2",
    *(f"ace 1.{row}" for row in range(2, 7)),  # 1.1 is the model of Kiros et al.
    *(f"todnet 1.{row}" for row in range(1, 7)),
    *(f"todnet 4.{row}" for row in range(1, 8)),
    *(f"todnet 5.{row}" for row in (7, 10, 12, 13, 14)),
    *(f"todnet 6.{row}" for row in (1, 2, 9, 13, 14)),
]


def test_every_row_of_the_papers_is_one_experiment_with_a_title_of_its_own() -> None:
    outlines = [presets.load_experiment_outline(name) for name in presets.list_preset_names("experiments")]
    found = [row for outline in outlines for row in outline.rows]
    assert sorted(found) == sorted(ROWS)
    titles = [outline.title for outline in outlines]
    assert all(titles)
    assert len(set(titles)) == len(titles)
    assert load_experiment("vsepp_resnet_ft_rv").title == "VSE++ (ResNet, FT, RC+rV)"


@pytest.mark.parametrize(
    ("name", "loss", "normalize", "absolute", "margin", "rate", "form"),
    [
        ("vse0", "sum", False, False, 0.2, 2e-4, "cosine"),
        ("vsepp", "max", True, False, 0.2, 2e-4, "cosine"),
        ("order0", "sum", True, True, 0.05, 1e-3, "order"),
        ("orderpp", "max", True, False, 0.2, 2e-4, "order"),
    ],
)
def test_the_four_models_are_those_of_the_paper(
    name: str, loss: str, normalize: bool, absolute: bool, margin: float, rate: float, form: str
) -> None:
    found = load_experiment(name)
    assert (found.loss.name, found.loss.margin) == (loss, margin)
    assert (found.model.normalize_image, found.model.absolute, found.model.similarity.name) == (normalize, absolute, form)
    assert (found.train.epochs, found.train.decay_after, found.train.learning_rate) == (30, 15, rate)
    assert (found.train.batch_size, found.model.dim, found.model.word_dim) == (128, 1024, 300)
    assert (found.train.clip, found.train.decay, found.train.min_count, found.train.precision) == (2.0, 0.1, 4, "fp32")
    assert found.warmup.epochs == (1 if name == "orderpp" else 0)


@pytest.mark.parametrize("base", ["vsepp_effnet", "twobranch_effnet", "cca_effnet"])
def test_an_experiment_differs_from_its_base_in_what_its_name_says(base: str) -> None:
    name = base.replace("_effnet", "_minilm_effnet")
    before = load_experiment(base).caption_feature
    changes = list_setting_changes(
        load_experiment(base).settings_affecting_weights(), load_experiment(name).settings_affecting_weights()
    )
    assert changes == [f"caption_feature: {before} -> minilm", f"name: {base} -> {name}"]
    infonce = list_setting_changes(
        load_experiment("vsepp_effnet").settings_affecting_weights(),
        load_experiment("infonce_effnet").settings_affecting_weights(),
    )
    assert {change.partition(".")[0].partition(":")[0] for change in infonce} == {"loss", "name"}


def test_the_embedding_networks_are_those_of_the_paper() -> None:
    full = load_experiment("twobranch_constraints")
    assert (full.feature, full.caption_feature, full.model.similarity.name) == ("fc7_10c", "hglmm", "euclidean")
    for encoder in (full.model.image_encoder, full.model.caption_encoder):
        assert isinstance(encoder, BranchSettings)
        assert (encoder.widths, encoder.batch_norm, encoder.dropout) == ([2048, 512], "after_last", 0.5)
    loss = full.loss
    assert (loss.name, loss.margin, loss.k, loss.reduction, loss.same_image) == ("top", 0.05, 10, "sum", "mask")
    assert (loss.lambda1, loss.lambda2, loss.lambda3, loss.lambda4) == (1, 1.5, 0, 0.05)
    assert (full.train.batch_size, full.train.learning_rate, full.train.sampling.name) == (500, 1e-4, "neighbourhood")
    lstm = load_experiment("twobranch_lstm")
    assert isinstance(lstm.model.caption_encoder, LstmSettings)
    assert (lstm.caption_feature, lstm.model.word_dim, lstm.model.dim) == (None, 256, 512)
    assert lstm.model.image_encoder == full.model.image_encoder
    assert lstm.model.caption_encoder.head == DenseLayersSettings(widths=[1024, 512])
    assert (lstm.train.learning_rate, lstm.loss.lambda4) == (2e-4, 0.05)


def test_the_two_branch_paper_trains_on_restval_of_coco_and_of_no_other_data_set() -> None:
    tables = tuple(f"twobranch {table}." for table in (2, 3, 4, 5))
    names = [name for name in EXPERIMENTS if any(row.startswith(tables) for row in load_experiment(name).rows)]
    assert names
    for name in names:
        on_coco = load_experiment(name, "coco")
        assert (on_coco.train.restval, on_coco.protocols) == (True, ["auto", "sentence", "sentence-1k"]), name
        assert not any(load_experiment(name, dataset).train.restval for dataset in (None, "f30k", "f8k", "demo")), name


@pytest.mark.parametrize(
    ("name", "weights", "layers", "sampling"),
    [
        ("twobranch", (1, 1.5, 0, 0), "nonlinear", "shuffled"),
        ("twobranch_single", (1, 0, 0, 0), "nonlinear", "shuffled"),
        ("twobranch_linear", (1, 1.5, 0, 0), "linear", "shuffled"),
        ("twobranch_linear_single", (1, 0, 0, 0), "linear", "shuffled"),
        ("twobranch_sampling", (1, 1.5, 0, 0), "nonlinear", "neighbourhood"),
    ],
)
def test_variants_differ_in_what_their_names_say(name: str, weights: tuple[float, ...], layers: str, sampling: str) -> None:
    found, full = load_experiment(name), load_experiment("twobranch_constraints")
    lambdas = dict(zip(("lambda1", "lambda2", "lambda3", "lambda4"), weights, strict=True))
    branch = BranchSettings(widths=[2048, 512] if layers == "nonlinear" else [2048])
    assert found.loss == full.loss.model_copy(update=lambdas)
    assert found.model == full.model.model_copy(update={"image_encoder": branch, "caption_encoder": branch})
    assert found.train == full.train.model_copy(update={"sampling": SAMPLERS[sampling]()})


@pytest.mark.parametrize(
    ("name", "weights", "widths", "positives", "neighbours"),
    [
        ("phrase_embedding", (1, 4, 0, 0), [1024, 512], "augmented", False),
        ("phrase_embedding_truth", (1, 4, 0, 0), [1024, 512], "truth", False),
        ("phrase_embedding_truth_single", (0, 1, 0, 0), [1024, 512], "truth", False),
        ("phrase_embedding_linear_truth_single", (0, 1, 0, 0), [1024], "truth", False),
        ("phrase_embedding_sampling", (1, 4, 0, 0), [1024, 512], "augmented", True),
        ("phrase_embedding_constraints", (1, 4, 0.1, 0.1), [1024, 512], "augmented", True),
        ("phrase_network", None, [1024, 512], "augmented", False),
        ("phrase_network_linear", None, [1024], "augmented", False),
        ("phrase_network_truth", None, [1024, 512], "truth", False),
        ("phrase_network_linear_truth", None, [1024], "truth", False),
        ("phrase_network_1fc", None, [1024, 512], "augmented", False),
        ("phrase_network_2fc", None, [1024, 512], "augmented", False),
    ],
)
@pytest.mark.parametrize("suffix", ["", "_effnet"])
def test_localisation_of_phrases_is_that_of_the_paper(
    name: str, weights: tuple[float, ...] | None, widths: list[int], positives: str, neighbours: bool, suffix: str
) -> None:
    """Sections 4.1 to 4.3; the margin is that of its other task."""
    found = load_experiment(name + suffix)
    solver, loss, train = found.solver, found.loss, found.train
    assert isinstance(solver, PhraseGradientSettings)
    assert (solver.positives, solver.positive_iou, solver.negative_iou) == (positives, 0.7, 0.3)
    sampling = (solver.neighbours, solver.negatives, solver.candidates, solver.coordinates)
    assert sampling == (neighbours, "balanced", None, "none")
    branch = BranchSettings(widths=widths, dropout=0.0)
    assert (found.model.image_encoder, found.model.caption_encoder) == (branch, branch)
    if weights is None:
        layers = {"phrase_network_1fc": [], "phrase_network_2fc": [512]}.get(name, [512, 256])
        assert (loss.name, found.model.similarity.model_dump()) == ("logistic", {"name": "network", "widths": layers})
    else:
        assert (loss.name, loss.margin, loss.k, loss.reduction) == ("top", 0.05, 30, "sum")
        assert (loss.lambda1, loss.lambda2, loss.lambda3, loss.lambda4) == weights
        assert found.model.similarity.name == "euclidean"
    further = name == "phrase_embedding_constraints"
    assert found.start_from == (f"phrase_embedding_sampling{suffix}" if further else None)
    assert (train.epochs, train.batch_size, train.learning_rate) == (2 if further else 8, 100, 1e-3)
    assert (train.decay, train.clip, train.sampling.name) == (1.0, None, "shuffled")
    boxes, captions = ("boxes_effnet_levels", "minilm_phrases") if suffix else ("boxes", "hglmm_phrases")
    assert (found.feature, found.truth_feature, found.caption_feature) == (boxes, f"{boxes}_truth", captions)


def test_random_crops_are_those_of_the_papers() -> None:
    """VSE++, section 3: a crop of 224 x 224 of the image at 256 x 256. TOD-Net, section IV-B: a random resize-and-crop."""
    for name in ("fc7_rc", "resnet_rc", "effnet_rc"):
        found = load_feature_preset(name)
        assert isinstance(found, CnnConfig)
        assert (found.crops, found.random_crop, found.resize, found.crop) == ("rc_bank", "plain", 256, 224)
    on_the_fly = [name for name in EXPERIMENTS if load_experiment(name).images.source == "pictures"]
    resized = [name for name in on_the_fly if load_experiment(name).images.random_crop != "plain"]
    assert (len(on_the_fly), set(resized)) == (12, {"dsve", "bert"})


def test_bert_is_trained_as_the_paper_says() -> None:
    """TOD-Net's paper, section IV-A and B."""
    found = load_experiment("bert")
    assert found.model.caption_encoder == BertSettings(
        model="google-bert/bert-large-uncased", pooling="mean", frozen_layers=16
    )
    assert found.model.image_encoder == WeldonSettings(channels=2400, k_max=15, k_min=15)
    assert (found.train.epochs, found.train.batch_size, found.train.decay_at, found.train.decay) == (30, 160, [1, 15], 0.1)
    assert found.train.frozen == {"cnn": 1, "caption_encoder.network": 1}
    assert (found.images.source, found.images.finetune, found.images.random_crop) == ("pictures", True, "resized")
    assert (found.loss.name, found.loss.same_image, found.start_from) == ("max", "keep", None)
    crops = [load_feature_preset(name) for name in (found.feature, str(found.eval_feature))]
    assert [(crop.resize, crop.crop) for crop in crops if isinstance(crop, CnnConfig)] == [(256, 256), (350, 350)]
    assert [load_experiment("bert", dataset).train.restval for dataset in ("coco", "f30k", "demo")] == [True, False, False]


@pytest.mark.parametrize("name", ["vse_infty", "vse_infty_bert", "vse_infty_effnet"])
def test_vse_infinity_is_that_of_the_authors_code(name: str) -> None:
    found = load_experiment(name)
    small = name.endswith("effnet")
    assert found.feature == ("effnet_grid" if small else "regions")
    assert found.model.image_encoder == GpoSettings(residual=True, size_augmentation=0.2)
    bert = BertSettings(model="google-bert/bert-base-uncased", pooling="gpo", size_augmentation=0.2)
    gru = GruSettings(states="pooled", bidirectional=True, size_augmentation=0.2)
    assert found.model.caption_encoder == (bert if name.endswith("bert") else gru)
    assert (found.model.dim, found.model.word_dim, found.model.similarity.name) == (1024, 300, "cosine")
    assert found.loss == MaxOfHinges(margin=0.2)
    assert (found.warmup.loss, found.warmup.epochs) == ("sum", 1)
    train = found.train
    assert (train.optimizer, train.weight_decay, train.undecayed) == ("adamw", 1e-4, [])
    assert (train.learning_rate, train.batch_size, train.clip, train.decay) == (5e-4, 128, 2.0, 0.1)
    assert (train.epochs, train.decay_after) == ((12, 8) if small else (25, 15))
    assert train.learning_rates == ({"caption_encoder.network": 5e-5} if name.endswith("bert") else {})
    assert load_experiment(name, "coco").train.restval == (not small)


def test_the_rows_of_papers_are_trained_by_adam_with_steps() -> None:
    papers = {"optimizer": "adam", "undecayed": ["words"], "schedule": "step", "warmup_steps": 0, "ema": None, "accumulate": 1}
    for name in EXPERIMENTS:
        if load_experiment(name).rows:
            assert load_experiment(name).train.model_dump(include=set(papers)) == papers, name


def test_dsve_loc_is_that_of_the_authors_code() -> None:
    found = load_experiment("dsve", "coco")
    image, caption, train = found.model.image_encoder, found.model.caption_encoder, found.train
    assert isinstance(image, WeldonSettings)
    assert isinstance(caption, SruSettings)
    assert (image.channels, image.k_max, image.k_min, image.dropout) == (2400, 15, 15, 0.5)
    assert (caption.layers, caption.dropout, caption.train_words, found.model.word_dim) == (4, 0.25, False, 620)
    assert (found.model.dim, found.model.similarity.name, found.model.normalize_image) == (2400, "cosine", True)
    assert found.loss == MaxOfHinges(margin=0.2, mirrored_positive=True)
    assert (train.epochs, train.batch_size, train.learning_rate, train.clip, train.restval) == (60, 160, 1e-3, None, True)
    assert (train.decay, train.decay_at) == (0.5, [3, 4, 5, 6, 7])
    first_layers = {f"cnn.network.model.{layer}": "always" for layer in ("conv1", "bn1", "layer1", "layer2")}
    assert train.frozen == {"caption_encoder": 2, "cnn": 9, **first_layers}
    layers = [f"cnn.network.{name}" for name, _ in TruncatedNetwork(resnet18(), "layer4").named_modules()]
    assert first_layers.keys() <= set(layers), "as in any ResNet of torchvision"
    assert (found.images.source, found.images.finetune, found.images.random_crop) == ("pictures", True, "resized")
    crops = [load_feature_preset(name) for name in (found.feature, found.eval_feature) if name]
    sizes = [(crop.resize, crop.crop, crop.grid) for crop in crops if isinstance(crop, CnnConfig)]
    assert sizes == [(256, 256, "all"), (400, 400, "all")]
    cached = load_experiment("dsve_cached", "coco")
    assert (cached.model, cached.loss, cached.train.frozen) == (found.model, found.loss, {"caption_encoder": 2})


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if "_ft" in name])
def test_fine_tuning_follows_the_paper(name: str) -> None:
    found = load_experiment(name)
    assert (found.train.epochs, found.train.learning_rate, found.train.decay_after) == (15, 2e-5, 15)
    base = load_experiment(str(found.start_from))
    assert (base.train.epochs, base.images.finetune, base.train.restval) == (30, False, found.train.restval)
    assert (base.model, base.loss, base.eval_feature) == (found.model, found.loss, found.feature)


OF_THE_TODNET_PAPER = {  # what each differs in from the paper's TOD-Net
    "todnet_vsepp_none": {"condition": "none"},
    "todnet_vsepp_caption": {"condition": "caption"},
    "todnet_vsepp_image": {"condition": "image"},
    "todnet_vsepp_query": {"condition": "query"},
    "todnet_vsepp_mlp": {"transform": "mlp", "hidden": 4},
}


@pytest.mark.parametrize("name", OF_THE_TODNET_PAPER)
def test_a_row_of_the_ablation_of_todnet_differs_in_its_map_alone(name: str) -> None:
    found, full = load_experiment(name), load_experiment("todnet_vsepp")
    assert found.model.similarity == full.model.similarity.model_copy(update=OF_THE_TODNET_PAPER[name])
    assert (found.train, found.loss, found.backbone) == (full.train, full.loss, full.backbone)
    small = load_experiment("todnet_effnet")
    at_home = load_experiment(name.replace("todnet_vsepp", "todnet") + "_effnet")
    assert at_home.model.similarity == found.model.similarity.model_copy(update={"width": 256})
    assert (at_home.train, at_home.backbone) == (small.train, "vsepp_effnet")


# What takes the place of networks whose random weights take seconds to draw, or whose weights take seconds to read.
SMALL = {
    "vgg19": {"model": "squeezenet1_1", "layer": "features.2"},
    "resnet152": {"model": "resnet18", "layer": "relu"},
    "open_clip/ViT-B-32": {"model": f"open_clip/{CLIP}", "weights": "random"},
    "sentence-transformers/all-MiniLM-L6-v2": {"model": f"open_clip/{CLIP}", "weights": "random"},
}


@pytest.fixture(scope="module")
def feature(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The cache of a feature preset on the demo, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("features")
    add_tiny_clip(folder)

    def make(name: str) -> Path:
        out = folder / f"demo_{name}.h5"
        if not out.exists():
            extract_shards(few, extractor(name, out), out, 1)
            merge_feature(few, out, 1)
        return out

    def extractor(name: str, out: Path) -> Extractor:
        extractor = load_feature_preset(name, "demo").extractor
        if extractor == "cnn":
            grid = "1" if load_feature_preset(name, "demo").extra == "openclip" else "2"  # a tower gives one vector
            config = load_feature_preset(name, "demo", ["resize=32", "crop=32", f"grid={grid}"])
            assert isinstance(config, CnnConfig)
            config = config.model_copy(update=SMALL.get(config.model, {}))
            return CnnExtractor(config)
        if extractor == "boxes":
            boxes = load_feature_preset(name, "demo", ["n_boxes=3", "pool=4", "grid=2"])
            assert isinstance(boxes, BoxesConfig)
            layers = {"layers": ("features.1", "features.2")} if boxes.layers else {"map": "features.1", "layer": "features.2"}
            small = {"model": "squeezenet1_1", **layers}
            return BoxesExtractor(boxes.model_copy(update=small), dataset=few)
        sizes = {"hglmm": ["centres=2", "pca=20", "ica=false", "trained_dim=8"], "mean_vector": ["trained_dim=8"], "tfidf": []}
        if extractor == "text":
            captions = load_feature_preset(name, "demo")
            assert isinstance(captions, TextConfig)
            return TextExtractor(captions.model_copy(update=SMALL[captions.model]))
        captions = load_feature_preset(name, "demo", [*sizes[extractor], "min_count=1"])
        assert not isinstance(captions, CnnConfig | RegionsConfig | BoxesConfig)
        return CaptionExtractor(captions, fit_encoder(few, captions, encoder_path(out)))

    return make


@pytest.fixture(scope="module")
def trained(feature: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of an experiment preset, of two steps, and before it those that it starts from."""
    folder = tmp_path_factory.mktemp("runs")

    def embeddings(backbone: str) -> Path:
        """The cache of images' embeddings by a run, beside that of captions."""
        out = folder / f"demo_{backbone}-0"
        paths = build_cache_paths(out)
        return paths["image"] if paths["image"].exists() else cache_run_embeddings(run(backbone), out)[0]

    def run(name: str) -> Path:
        out = folder / f"demo_{name}" / "seed-0"
        if not out.exists():
            config = load_experiment(name, "demo", ["train.epochs=1", "train.batch_size=25"])
            if config.start_from:
                run(config.start_from)
            for other in (config.eval_feature, config.caption_feature, config.truth_feature):
                if other:
                    feature(other)
            read = embeddings(config.backbone) if config.backbone else feature(config.feature)
            train(read, config, out=out)
        return out

    return run


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_two_steps_on_the_demo(name: str, trained: Callable[[str], Path]) -> None:
    run = RunFolder(trained(name))
    assert run.read_record()["state"] == "finished"
    solver, checkpoint = run.read_settings(ExperimentConfig).solver, run.read_checkpoint()
    if isinstance(solver, NoTrainingSettings):
        assert (len(checkpoint["rows"]), run.read_best_weights()) == (1, {})
    elif isinstance(solver, CommonCcaSettings):
        assert len(checkpoint["rows"]) == len(solver.regularization)
    elif isinstance(solver, PhraseGradientSettings):
        assert len(checkpoint["rows"]) == 1
    elif isinstance(solver, RidgeSettings | CsaSettings | AsifSettings):
        assert len(checkpoint["rows"]) > 1
    else:
        assert {float(entry["step"]) for entry in checkpoint["optimizer"]["state"].values()} == {2.0}
    assert run.best_weights_file.is_file()

# Settings and helper functions of the rules. The rules call commands; what a name means is decided in vse.pipeline.presets.presets.
import functools
import json
import os
import sys

from snakemake.exceptions import WorkflowError

from vse.eval.tables import published_rows, published_tables
from vse.features.settings.presets import load_feature
from vse.features.extraction import images_sha256
from vse.pipeline.presets import presets
from vse.pipeline.dataset import sources
from vse.pipeline.errors import UserError
from vse.pipeline.presets.own_code import code_sums
from vse.pipeline.workflow import check_targets, dataset_pattern
from vse.pipeline.workflow import PLANNING

try:
    SETTINGS = presets.load_workflow(config)
    check_targets(sys.argv)
except UserError as error:  # one line, where a WorkflowError is shown with a traceback
    print(f"snakemake: error: {error}", file=sys.stderr)
    sys.exit(1)


def gpus(rule):
    """The GPUs that jobs of a rule ask for, one or as many as the settings say; none if the device is a processor."""
    count = SETTINGS.gpus.get(rule, 1) if SETTINGS.device != "cpu" else 0
    model = SETTINGS.gpu_models.get(rule)
    return {"gpu": count, **({"gpu_model": model} if model and count else {})}


wildcard_constraints:
    dataset=dataset_pattern(),
    feature=r"(?![^/.]*-\d+_(?:images|captions)\.)[^/.]+",  # those are embeddings, of the rule embed_as_features
    experiment=r"[^/.]+",
    seed=r"\d+",
    shard=r"\d{5}",
    shards=r"\d{5}",


# How a job runs, not what it makes, goes to the commands by environment: as a parameter of a rule, a changed value would
# make its jobs run again.
os.environ["VSE_DEVICE"] = SETTINGS.device
os.environ["VSE_SKIP_BAD"] = str(int(SETTINGS.skip_bad))
os.environ.update({sources.folder_variable(name): folder for name, folder in SETTINGS.sources.items()})
os.environ["VSE_WEIGHTS_DIR"] = SETTINGS.weights_dir or os.environ.get("VSE_WEIGHTS_DIR", "")
os.environ["VSE_WORDS"] = SETTINGS.words or os.environ.get("VSE_WORDS", "")


envvars:
    "VSE_DEVICE",
    "VSE_SKIP_BAD",
    "VSE_WEIGHTS_DIR",
    "VSE_WORDS",


def resolved(load, *names):
    """A preset by name; a wrong name ends the workflow with the nearest valid one."""
    try:
        return load(*names)
    except UserError as error:
        raise WorkflowError(str(error))


def feature_preset(wildcards):
    """The preset of a feature."""
    return resolved(load_feature, wildcards.feature, wildcards.dataset)


def feature_settings(wildcards):
    """The settings that determine a feature, so that a changed one makes its jobs run again."""
    return json.dumps(feature_preset(wildcards).triggers())


def image_state(wildcards):
    """The images of a shard, by their content, so that replaced ones make its job run again; none for captions."""
    if feature_preset(wildcards).kind != "image":
        return ""
    cache = Path("features", f"{wildcards.dataset}_{wildcards.feature}.h5")
    dataset = Path("data", wildcards.dataset, "dataset.json")
    return resolved(images_sha256, dataset, cache, int(wildcards.shard), int(wildcards.shards))


def word_file(wildcards):
    """The file of word vectors of a caption feature that is built on some; none if they are trained."""
    file = feature_preset(wildcards).word_file(os.environ["VSE_WORDS"])
    return [str(file)] if file else []


def feature_encoder(wildcards):
    """The encoder that is fitted before a feature can be made; none for most."""
    fitted = feature_preset(wildcards).fitted
    return [f"features/{wildcards.dataset}_{wildcards.feature}.encoder.safetensors"] if fitted else []


def experiment_preset(wildcards):
    """The preset of an experiment."""
    return resolved(presets.load_plan, wildcards.experiment, wildcards.dataset)


def experiment_settings(wildcards):
    """Every setting of an experiment, and the code outside of the package, so that a changed one makes its jobs run again."""
    content = experiment_preset(wildcards).content()
    sums = code_sums(content)
    return json.dumps({**content, "code": sums} if sums else content)


def published_files(wildcards):
    """An input function without inputs: says what to put where if a data set's published files are not there."""
    config = resolved(presets.load_dataset, wildcards.dataset)
    if os.environ.get(PLANNING) != "1" and not Path("data", wildcards.dataset, "dataset.json").exists():
        resolved(sources.source_files, config, sources.source_folder(wildcards.dataset))
    return []


def feature_shards(wildcards):
    """All shards of a feature, as many as the data set's preset says."""
    n = resolved(presets.load_dataset, wildcards.dataset).shards
    stem = f"features/{wildcards.dataset}_{wildcards.feature}.shards/shard"
    return [f"{stem}-{k:05d}-of-{n:05d}.{suffix}" for k in range(n) for suffix in ("h5", "json")]


def training_features(wildcards):
    """The caches of images that an experiment trains on and is validated on, which are often the same."""
    config = experiment_preset(wildcards)
    if config.backbone:
        return [f"features/{wildcards.dataset}_{config.backbone}-{wildcards.seed}_images.h5"]
    names = dict.fromkeys([config.feature, config.eval_feature or config.feature])
    return [f"features/{wildcards.dataset}_{name}.h5" for name in names]


def evaluation_features(wildcards):
    """The cache of images that an experiment is validated and tested on."""
    return training_features(wildcards)[-1]


def truth_features(wildcards):
    """The cache of regions at ground-truth boxes that a training on phrases reads; none for others."""
    name = experiment_preset(wildcards).truth_feature
    return [f"features/{wildcards.dataset}_{name}.h5"] if name else []


def caption_features(wildcards):
    """The cache of captions that an experiment reads; none if it reads words."""
    config = experiment_preset(wildcards)
    if config.backbone:
        return [f"features/{wildcards.dataset}_{config.backbone}-{wildcards.seed}_captions.h5"]
    name = config.caption_feature
    return [f"features/{wildcards.dataset}_{name}.h5"] if name else []


def evaluation_options(wildcards):
    """How an experiment is evaluated, as options of vse-eval: by which protocols, and whether it is an ensemble."""
    config = experiment_preset(wildcards)
    ensemble = [f"--ensemble --experiment {wildcards.experiment}"] if config.ensemble_of else []
    return " ".join([*ensemble, *(f"--protocol {name}" for name in config.protocols)])


def base_run(wildcards):
    """The run that an experiment starts from, of the same seed; none for most."""
    base = experiment_preset(wildcards).start_from
    return [f"runs/{wildcards.dataset}_{base}/seed-{wildcards.seed}/run.json"] if base else []


def embeddings_of_seeds(wildcards):
    """The embeddings of every seed of an experiment; of an ensemble, those of its members."""
    return _files_of_split(wildcards, "test")


def validation_of_seeds(wildcards):
    """Of an ensemble with a model of phrases, what the share of these is chosen by; none for others."""
    return _files_of_split(wildcards, "val") if _phrase_models(wildcards) else []


def _files_of_split(wildcards, split):
    config = experiment_preset(wildcards)
    by_phrases = _phrase_models(wildcards)
    # Of an ensemble of one experiment the seeds are the members.
    seeds = config.seeds if len(config.ensemble_of) == 1 else SETTINGS.seeds or config.seeds
    names = {
        name: f"{split}_sentences" if name in by_phrases else split for name in config.ensemble_of or [wildcards.experiment]
    }
    return [f"runs/{wildcards.dataset}_{name}/seed-{seed}/{file}.h5" for seed in seeds for name, file in names.items()]


def _phrase_models(wildcards):
    """The members of an ensemble that localise phrases: they alone read ground-truth regions."""
    members = experiment_preset(wildcards).ensemble_of
    return [name for name in members if resolved(presets.load_plan, name, wildcards.dataset).truth_feature]


@functools.cache
def ladder_experiments(dataset):
    """The experiments of a ladder, composed of those that fit together; what does not is said once."""
    from vse.train.named_experiment import fitting  # it reads what models take, and imports torch for that

    fits, misfits = resolved(fitting, SETTINGS.ladder or dataset, dataset)
    for name, why in misfits.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    return fits


def ladder_results(wildcards):
    """The results of all rows of a ladder."""
    return [f"results/{wildcards.dataset}_{name}.json" for name in ladder_experiments(wildcards.dataset)]


def results_of_table(wildcards):
    """The results of all experiments that are rows of a published table, on the data sets of the rows or on the one asked."""
    pairs = resolved(published_rows.table_experiments, wildcards.table, SETTINGS.dataset)
    return [f"results/{dataset}_{experiment}.json" for dataset, experiment in pairs]

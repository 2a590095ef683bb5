# Settings and helper functions of the rules. The rules call commands. vse.pipeline.presets.presets resolves the names.
import functools
import json
import os
import sys

from snakemake.exceptions import WorkflowError

from vse.eval.tables import published_rows, published_table_names
from vse.features.settings import list_imported_features, load_feature_preset
from vse.features.up_to_date import hash_changed_photos
from vse.pipeline.command import collect_garbage_rarely
from vse.pipeline.presets import presets
from vse.pipeline.dataset import preparation
from vse.pipeline.dataset.dataset import find_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.presets.schema import CORRECTIONS
from vse.pipeline.presets.own_code import allow_own_code, hash_code_files
from vse.pipeline.workflow import PLANNING_VARIABLE, check_targets, build_dataset_pattern

collect_garbage_rarely()
try:
    SETTINGS = presets.load_workflow_settings(config)
    check_targets(sys.argv)
except UserError as error:  # print one line; Snakemake prints a WorkflowError with a traceback
    print(f"snakemake: error: {error}", file=sys.stderr)
    sys.exit(1)


# The rules send the output of their commands to a log and to the terminal, with tee. If the logger plugin of the profile
# (pipeline/step_logger.py) prints a line for each step, the output goes only to the log.
QUIET = "vse" in workflow.output_settings.log_handler_settings and not workflow.output_settings.verbose
if QUIET or STORAGE:
    shell.prefix(f"set -euo pipefail; {ENTER_LOCAL_COPIES}{'exec >/dev/null; ' if QUIET else ''}")


def gpu_resources(rule):
    """Return the GPU resources of a job: one GPU, unless the settings have another number for the rule; none on a CPU."""
    count = SETTINGS.gpus.get(rule, 1) if SETTINGS.device != "cpu" else 0
    model = SETTINGS.gpu_models.get(rule)
    return {"gpu": count, **({"gpu_model": model} if model and count else {})}


wildcard_constraints:
    dataset=build_dataset_pattern(),
    feature=r"(?![^/.]*-\d+_(?:images|captions)\.)[^/.]+",  # these names are outputs of the rule embed_as_features
    experiment=r"[^/.]+",
    seed=r"\d+",
    shard=r"\d{5}",
    shards=r"\d{5}",


# Settings that do not change the outputs are passed to the commands as environment variables. If they were parameters of
# rules, a changed value would run the jobs again. The commands ignore empty variables.
os.environ["VSE_DEVICE"] = SETTINGS.device if SETTINGS.device != "auto" else ""
os.environ["VSE_SKIP_BAD"] = "1" if SETTINGS.skip_bad else ""
os.environ.update({preparation.source_folder_variable(name): folder for name, folder in SETTINGS.sources.items()})
os.environ["VSE_WEIGHTS_DIR"] = str(SETTINGS.weights_dir or "") or os.environ.get("VSE_WEIGHTS_DIR", "")
os.environ["VSE_WORDS"] = str(SETTINGS.words or "") or os.environ.get("VSE_WORDS", "")


envvars:
    "VSE_DEVICE",
    "VSE_SKIP_BAD",
    "VSE_WEIGHTS_DIR",
    "VSE_WORDS",


def load_or_stop(load, *names):
    """Return ``load(*names)``. A wrong name ends the workflow with a message that suggests the nearest valid name."""
    try:
        with allow_own_code(os.environ.get("VSE_ALLOW_CODE", "").lower() in ("1", "true", "yes", "on")):
            return load(*names)
    except UserError as error:
        raise WorkflowError(str(error))


@functools.cache  # a large workflow needs each preset hundreds of times
def load_cached_preset(load, *names):
    """Return the preset ``load(*names)``, as ``load_or_stop`` does, from the second call on without loading it again."""
    return load_or_stop(load, *names)


def dataset_preset(wildcards):
    """Return the preset of the data set in the wildcards."""
    return load_cached_preset(presets.load_dataset_preset, wildcards.dataset)


def dataset_file(wildcards):
    """Return the file of a run's training data: the data set or, if it is divided into folds, the fold of the run's seed."""
    preset = dataset_preset(wildcards)
    fold = f"data/{wildcards.dataset}/fold-{int(wildcards.seed) % preset.folds}.json" if preset.folds_of else None
    return fold or whole_dataset_file(wildcards)


def whole_dataset_file(wildcards):
    """Return the file of the complete data set: dataset.json, or dataset.parquet if only this file exists."""
    return find_dataset_file(Path("data", wildcards.dataset)).as_posix()


def cache_stem(wildcards):
    """Return the beginning of the names of a data set's caches. Folds read the caches of the data set that was divided."""
    return f"features/{dataset_preset(wildcards).folds_of or wildcards.dataset}"


def feature_preset(wildcards):
    """Return the preset of a feature."""
    return load_cached_preset(load_feature_preset, wildcards.feature, wildcards.dataset)


def feature_settings(wildcards):
    """Return the settings that determine a feature, as JSON. If one changes, Snakemake runs the jobs again."""
    return json.dumps(feature_preset(wildcards).list_rerun_settings())


def changed_photos(wildcards):
    """Return a text that changes with the photographs of a shard, so that its job runs again; empty for captions."""
    feature = feature_preset(wildcards)
    if feature.kind != "image" or STORAGE:  # in a storage, the folder of photographs is an input of its own
        return ""
    cache = Path("features", f"{wildcards.dataset}_{wildcards.feature}.h5")
    dataset = Path(whole_dataset_file(wildcards))
    return load_or_stop(
        hash_changed_photos, dataset, cache, int(wildcards.shard), int(wildcards.shards), getattr(feature, "splits", None)
    )


def word_file(wildcards):
    """Return the file of pretrained word vectors that a caption feature needs, if any."""
    file = feature_preset(wildcards).find_word_file(os.environ["VSE_WORDS"])
    return [local(str(file))] if file else []


def input_files(wildcards):
    """Return the local files that the extraction of a feature reads, such as weights. They are never in a storage."""
    return [local(str(file)) for file in feature_preset(wildcards).list_input_files()]


def encoder_file(wildcards):
    """Return the fitted encoder that a feature needs, if any."""
    fits = feature_preset(wildcards).fits_encoder
    return [f"features/{wildcards.dataset}_{wildcards.feature}.encoder.safetensors"] if fits else []


def experiment_preset(wildcards):
    """Return the preset of an experiment."""
    return load_cached_preset(presets.load_experiment_outline, wildcards.experiment, wildcards.dataset)


def experiment_settings(wildcards):
    """Return the settings of an experiment and the checksums of the user's own code in them, as JSON.

    If one of them changes, Snakemake runs the jobs again.
    """
    content = experiment_preset(wildcards).settings_affecting_weights()
    checksums = hash_code_files(content)
    return json.dumps({**content, "code": checksums} if checksums else content)


def require_published_files(wildcards):
    """Return no inputs. End the workflow with instructions if the published files of a data set are missing."""
    config = load_cached_preset(presets.load_dataset_preset, wildcards.dataset)
    if os.environ.get(PLANNING_VARIABLE) != "1" and not is_available(whole_dataset_file(wildcards)):
        load_or_stop(preparation.find_source_files, config, preparation.find_source_folder(wildcards.dataset))
    return []


IMPORTED_FEATURES = "|".join(list_imported_features()) or "(?!)"


def require_imported_cache(wildcards):
    """Return no inputs. End the workflow with instructions if the cache of an imported feature is missing."""
    cache = Path("features", f"{wildcards.dataset}_{wildcards.feature}.h5")
    if os.environ.get(PLANNING_VARIABLE) != "1" and not is_available(cache):
        dataset = Path(whole_dataset_file(wildcards))
        raise WorkflowError(feature_preset(wildcards).describe_import(dataset, cache))
    return []


def feature_shards(wildcards):
    """Return the files of all shards of a feature. The preset of the data set has the number of shards."""
    n = load_cached_preset(presets.load_dataset_preset, wildcards.dataset).shards
    stem = f"features/{wildcards.dataset}_{wildcards.feature}.shards/shard"
    return [f"{stem}-{k:05d}-of-{n:05d}.{suffix}" for k in range(n) for suffix in ("h5", "json")]


def training_caches(wildcards):
    """Return the image caches of an experiment: for training, then for validation if this is another cache."""
    config = experiment_preset(wildcards)
    if config.backbone:
        return [f"features/{wildcards.dataset}_{config.backbone}-{wildcards.seed}_images.h5"]
    names = dict.fromkeys([config.feature, config.eval_feature or config.feature])
    return [f"{cache_stem(wildcards)}_{name}.h5" for name in names]


def evaluation_cache(wildcards):
    """Return the image cache for the validation and the test of an experiment."""
    return training_caches(wildcards)[-1]


def truth_cache(wildcards):
    """Return the cache of regions at ground-truth boxes that a training on phrases needs, if any."""
    name = experiment_preset(wildcards).truth_feature
    return [f"{cache_stem(wildcards)}_{name}.h5"] if name else []


def caption_cache(wildcards):
    """Return the caption cache of an experiment; an empty list if the experiment reads words."""
    config = experiment_preset(wildcards)
    if config.backbone:
        return [f"features/{wildcards.dataset}_{config.backbone}-{wildcards.seed}_captions.h5"]
    name = config.caption_feature
    return [f"{cache_stem(wildcards)}_{name}.h5"] if name else []


def evaluation_options(wildcards):
    """Return the options of vse-eval for an experiment: its protocols, and --ensemble for an ensemble."""
    config = experiment_preset(wildcards)
    ensemble = [f"--ensemble --experiment {wildcards.experiment}"] if config.ensemble_of else []
    return " ".join([*ensemble, *(f"--protocol {name}" for name in config.protocols)])


def base_run(wildcards):
    """Return the files of the run whose weights a training starts from (it has the same seed), if any."""
    base = experiment_preset(wildcards).start_from
    folder = f"runs/{wildcards.dataset}_{base}/seed-{wildcards.seed}"
    return [*run_files(folder), *transformer_files(folder)] if base else []


def test_embeddings(wildcards):
    """Return the test embeddings of all seeds of an experiment; for an ensemble, of all its members."""
    return _list_split_embeddings(wildcards, "test")


def validation_embeddings(wildcards):
    """Return the validation embeddings of an ensemble with a phrase model, whose weight is chosen by them; otherwise none."""
    return _list_split_embeddings(wildcards, "val") if _phrase_models(wildcards) else []


def _list_split_embeddings(wildcards, split):
    config = experiment_preset(wildcards)
    by_phrases = _phrase_models(wildcards)
    # In an ensemble of one experiment, the seeds are the members.
    seeds = config.seeds if len(config.ensemble_of) == 1 else SETTINGS.seeds or config.seeds
    if dataset_preset(wildcards).folds_of:
        seeds = range(dataset_preset(wildcards).folds)
    names = {
        name: f"{split}_sentences" if name in by_phrases else split for name in config.ensemble_of or [wildcards.experiment]
    }
    return [f"runs/{wildcards.dataset}_{name}/seed-{seed}/{file}.h5" for seed in seeds for name, file in names.items()]


def _phrase_models(wildcards):
    """Return the members of an ensemble that localise phrases. Only these read ground-truth regions."""
    members = experiment_preset(wildcards).ensemble_of
    return [
        name for name in members if load_cached_preset(presets.load_experiment_outline, name, wildcards.dataset).truth_feature
    ]


@functools.cache
def ladder_experiments(dataset):
    """Return the experiments of a ladder whose parts fit together. Print a reason for each other experiment, but only once."""
    from vse.training.experiment import find_trainable_combinations  # lazy: imports torch

    fits, misfits = load_or_stop(find_trainable_combinations, SETTINGS.ladder or dataset, dataset)
    for name, why in misfits.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    return fits


def ladder_results(wildcards):
    """Return the result files of all rows of a ladder, and of the same rows with each correction of hubs in the ladder."""
    from vse.training.experiment import select_correctable_experiments  # lazy: imports torch

    dataset = wildcards.dataset
    names = ladder_experiments(dataset)
    corrections = presets.load_ladder(SETTINGS.ladder or dataset).corrections
    corrected = [
        f"results/corrected/{dataset}_{name}_{correction}.json"
        for name in (select_correctable_experiments(names, dataset) if corrections else [])
        for correction in corrections
    ]
    return [*(f"results/{dataset}_{name}.json" for name in names), *corrected]


def bank_embeddings(wildcards):
    """Return the embeddings to fit and select a correction of hubs: the training and validation splits of all seeds."""
    return [path for split in ("train", "val") for path in _list_split_embeddings(wildcards, split)]


def published_table_results(wildcards):
    """Return the result files for a published table, on the data set of each row or on the data set in the settings."""
    pairs = load_or_stop(published_rows.table_experiments, wildcards.table, SETTINGS.dataset)
    return [f"results/{dataset}_{experiment}.json" for dataset, experiment in pairs]

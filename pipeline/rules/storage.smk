# The files of jobs in a storage, such as S3 (docs/storage.md). Snakemake copies the declared inputs of a job from the storage
# to a local folder, and the declared outputs back. This folder has the layout of the working folder, and commands run in it.
import os
import re
import shlex

STORAGE = workflow.storage_registry.default_storage_provider


def stored_object(path):
    """Return the object of a path in the storage."""
    return STORAGE.object(os.path.join(workflow.storage_settings.default_storage_prefix or "", path))


ENTER_LOCAL_COPIES = ""
if STORAGE:
    STORAGE.local_prefix = Path(STORAGE.local_prefix).absolute()  # so that commands find inputs and outputs from any folder
    folder = shlex.quote(str(stored_object("data").local_path().parent))
    ENTER_LOCAL_COPIES = f"mkdir -p {folder}; cd {folder}; "


def stored(*files):
    """Return files to declare as inputs or outputs only with a storage. Otherwise jobs find them in the working folder."""
    return list(files) if STORAGE else []


def is_available(path):
    """Return whether a file exists in the storage or, without a storage, in the working folder."""
    return stored_object(path).exists() if STORAGE else Path(path).exists()


def run_files(folder):
    """Return the files that other jobs read in the folder of a run."""
    names = ("config.yaml", "vocab.json", "metrics.csv", "best.safetensors")
    return [f"{folder}/{name}" for name in ("run.json", *stored(*names))]


def transformer_files(folder):
    """Return the further files of a run with a transformer. For other runs, the storage has empty files."""
    return stored(f"{folder}/tokenizer.json", f"{folder}/transformer.json")


def photo_folder(wildcards):
    """Return the folder of photographs that the extraction of a feature reads from the storage, if any.

    Each photograph is read only once (access.sequential). A storage in a mounted folder therefore links the folder instead of
    copying it, if a single job reads it.
    """
    return (
        [access.sequential(folder) for folder in stored(f"data/{wildcards.dataset}/images")]
        if feature_preset(wildcards).kind == "image"
        else []
    )


def report_files(wildcards):
    """Return the data set with its photographs, and the metrics of all epochs, which a report displays."""
    files = [f"{os.path.dirname(embeddings)}/metrics.csv" for embeddings in test_embeddings(wildcards)]
    feature = experiment_preset(wildcards).feature
    if not dataset_preset(wildcards).folds_of and not re.fullmatch(IMPORTED_FEATURES, feature or ""):
        files += [f"data/{wildcards.dataset}/dataset.json", f"data/{wildcards.dataset}/images"]
    return stored(*files)


def fit_duration(wildcards):
    """Return the file with the duration of the fit of an encoder, if any."""
    return stored(*(file.replace(".safetensors", ".json") for file in encoder_file(wildcards)))


def cache_parts(*list_caches):
    """Return an input function for the data set and the shards of caches, from the input functions for the caches."""

    def list_parts(wildcards):
        named = (list_paths(wildcards) for list_paths in list_caches)
        caches = [cache for paths in named for cache in ([paths] if isinstance(paths, str) else paths)]
        parent = dataset_preset(wildcards).folds_of or wildcards.dataset
        return stored(f"data/{parent}/dataset.json", *(part for cache in caches for part in _list_shards(cache, parent)))

    return list_parts


def _list_shards(cache, dataset):
    folder = cache.replace(".h5", ".shards")
    if re.fullmatch(rf"features/{dataset}_({IMPORTED_FEATURES}|.*-\d+_(images|captions))\.h5", cache):
        return [folder]
    n = load_cached_preset(presets.load_dataset_preset, dataset).shards
    return [f"{folder}/manifest.json", *(f"{folder}/shard-{k:05d}-of-{n:05d}.h5" for k in range(n))]

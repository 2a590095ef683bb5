"""The commands ``vse`` and ``vse-data``, and the sub-command ``vse doctor``.

All commands of the package are sub-commands of ``vse``, grouped by task: ``vse train`` is the same as ``vse-train``. Most
modules with sub-commands are only imported when a sub-command is called.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vse.pipeline import __version__
from vse.pipeline.cli import data_group
from vse.pipeline.command import count_allowed_cores, entry_point
from vse.pipeline.errors import UserError, did_you_mean, extra_install_command
from vse.pipeline.options import Options, command
from vse.pipeline.presets.parts import import_object

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# The names of the sub-commands of each task, and the module and function of each sub-command.
COMMANDS_BY_TASK = {
    "Start": {
        "quickstart": "vse.quickstart:quickstart_command",
        "doctor": "vse.cli:doctor_command",
    },
    "Prepare data and features": {
        "data": "vse.cli:data_group",
        "extract": "vse.features.cli:extract",
    },
    "Train": {
        "train": "vse.training.cli:train_command",
        "embed": "vse.training.cli:embed_command",
    },
    "Write your own parts": {
        "new": "vse.training.cli:new_command",
        "check": "vse.training.cli:check_command",
    },
    "Evaluate": {
        "eval": "vse.eval.cli:eval_command",
        "table": "vse.eval.cli:table_command",
        "report": "vse.training.cli:report_command",
    },
    "Search": {
        "search": "vse.training.cli:search_command",
        "serve": "vse.training.serve.cli:serve_command",
    },
    "Share": {
        "model": "vse.training.cli:model_group",
    },
}
_IMPORT_PATH_BY_COMMAND = {name: path for commands in COMMANDS_BY_TASK.values() for name, path in commands.items()}
_SUMMARY_LENGTH = 90  # characters of a command's summary in the help


def load_command(name: str) -> click.Command:
    """Import and return a sub-command of ``vse`` by its name, such as ``train``."""
    found: click.Command = import_object(_IMPORT_PATH_BY_COMMAND[name])
    return found


class _TaskGroup(click.Group):
    """A click group that imports its commands from the modules in ``COMMANDS_BY_TASK``, and lists them by task."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_IMPORT_PATH_BY_COMMAND)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in _IMPORT_PATH_BY_COMMAND else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for task, places in COMMANDS_BY_TASK.items():
            commands = {name: import_object(place) for name, place in places.items()}
            with formatter.section(task):
                formatter.write_dl([(name, one.get_short_help_str(_SUMMARY_LENGTH)) for name, one in commands.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _IMPORT_PATH_BY_COMMAND and not args[0].startswith("-"):
            raise UserError(f"no command {args[0]!r}{did_you_mean(args[0], _IMPORT_PATH_BY_COMMAND)}")
        return super().resolve_command(ctx, args)


@click.group("vse", cls=_TaskGroup)
def vse_group() -> None:
    """Retrieve images by captions, and captions by images: prepare data, train models, evaluate and search.

    Most commands have a name of their own, too: vse-train is the same as vse train.
    """


main = entry_point(vse_group)


data_group.further_module = "vse.features.cli"
data_main = entry_point(data_group)


DISTRIBUTION = "vse-pipeline"
# The abilities that each extra (optional group of dependencies) of the package enables.
ABILITY_BY_EXTRA = {
    "timm": "image features of timm's networks, such as effnet and dino",
    "text": "caption features of transformers, such as minilm",
    "openclip": "features of OpenCLIP, such as clip",
    "serve": "the search page of vse serve",
    "xlsx": "spreadsheets of Excel (.xlsx)",
    "datasets": "data sets of the Hugging Face library datasets",
    "edgeboxes": "box proposals of EdgeBoxes and selective search",
    "chunker": "noun phrases of captions by spaCy",
    "nltk": "captions split into words by NLTK",
    "eccv": "the protocols cxc and eccv",
    "tensorboard": "vse train --tensorboard",
    "remote": "archives of photos at a URL",
    "slurm": "the workflow on SLURM",
    "storage": "the workflow with its files in S3 or another storage",
    "kubernetes": "the workflow on Kubernetes",
    "docs": "this documentation as a site",
    "test": "the tests",
}
_LIBRARIES = ("torch", "torchvision", "faiss-cpu", "faiss-gpu", "snakemake", "numpy", "h5py")
_INSTRUCTION_SETS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "bf16", "amx_bf16": "AMX", "bf16": "bf16"}


class DoctorRequest(Options):
    """The arguments of ``vse doctor``, which has none."""


@command("doctor")
def doctor_command(request: DoctorRequest) -> None:
    """Describe this machine, the versions of libraries, and the extras and weights found.

    Extras are groups of optional libraries. For each missing extra and each missing file of weights, the command prints what
    it would enable and how to get it.
    """
    for name, text in (*_describe_machine(), *_describe_extras(), *_describe_weights()):
        click.echo(f"{name:<11}{text}")


def _describe_machine() -> Iterator[tuple[str, str]]:
    yield "vse", f"{__version__} in {Path(__file__).resolve().parent}"
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    versions = {name: version for name in _LIBRARIES if (version := _find_version(name)) is not None}
    yield "libraries", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "processor", _describe_processor()
    yield "GPU", _describe_gpu(versions.get("torch", ""))
    if (memory := _read_memory_gb()) is not None:
        yield "memory", f"{memory[0]:.1f} of {memory[1]:.1f} GB free"
    yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.1f} GB free in {Path.cwd()}"


def _find_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _describe_processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()] if cpuinfo.is_file() else []
    values = {key.strip(): value.strip() for key, _, value in lines}
    flags = {*values.get("flags", "").split(), *values.get("Features", "").split()}
    sets = dict.fromkeys(title for flag, title in _INSTRUCTION_SETS.items() if flag in flags)
    name = values.get("model name") or platform.processor() or platform.machine()
    cores = count_allowed_cores()
    usable = f"{cores} core{'s' if cores > 1 else ''} for this process"
    return "; ".join([name, usable, *([", ".join(sets)] if sets else [])])


def _describe_gpu(torch_version: str) -> str:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        found = []
    if not found:
        return "none found; everything runs on the processor"
    if torch_version.endswith("+cpu"):
        return f"{'; '.join(found)}, but PyTorch is installed without CUDA: pip install --force-reinstall torch torchvision"
    return "; ".join(found)


def _read_memory_gb() -> tuple[float, float] | None:
    """Return the available and the total memory in 1e9 bytes, or None if the system does not report it."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in meminfo.read_text().splitlines())}
    return kib["MemAvailable"] * 1024 / 1e9, kib["MemTotal"] * 1024 / 1e9


def _describe_extras() -> Iterator[tuple[str, str]]:
    from packaging.requirements import Requirement  # lazy, as all commands of vse and vse-data import this module

    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    always = _list_required_packages(requirements, "")
    needed = {extra: _list_required_packages(requirements, extra) - always for extra in ABILITY_BY_EXTRA}
    uninstalled = {name for name in set().union(*needed.values()) if _find_version(name) is None}
    missing = {extra: sorted(names & uninstalled) for extra, names in needed.items() if names & uninstalled}
    yield "extras", ", ".join(extra for extra in ABILITY_BY_EXTRA if extra not in missing) or "none"
    for extra, packages in missing.items():
        lacks = ", ".join(packages)
        yield "  missing", f"{extra}, for {ABILITY_BY_EXTRA[extra]} (lacks {lacks}): {extra_install_command(extra)}"


def _list_required_packages(requirements: Iterable[Requirement], extra: str) -> set[str]:
    """Return the names of all packages that ``vse`` needs with an extra. An empty ``extra`` stands for no extra."""
    return {one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": extra})}


def _describe_weights() -> Iterator[tuple[str, str]]:
    from vse.features.settings import load_feature_preset
    from vse.pipeline.presets.preset_files import list_preset_names

    features_by_model: dict[str, list[str]] = {}
    for name in list_preset_names("features"):
        settings = load_feature_preset(name)
        model, weights = getattr(settings, "model", None), getattr(settings, "weights", None)
        if model is not None and weights != "random" and not settings.list_input_files():
            features_by_model.setdefault(model, []).append(name)
    missing = []
    for model, features in features_by_model.items():
        if (place := find_weights(model)) is not None:
            yield "weights", f"{model}: {place}"
        else:
            missing.append((model, features))
    folder = os.environ.get("VSE_WEIGHTS_DIR")
    hint = f"put their files into {folder}" if folder else "name a folder of weights in VSE_WEIGHTS_DIR"
    if missing:
        yield "  missing", f"weights of these networks. They are downloaded when they are first used; offline, {hint}:"
    for model, features in missing:
        shown = ", ".join(features[:3]) + (", ..." if len(features) > 3 else "")
        yield "", f"{model}, for {shown}"


def find_weights(model: str) -> Path | None:
    """Return the path of the weights of the network ``model``, a file or a folder; None if they are not found.

    The weights are searched in VSE_WEIGHTS_DIR and in the download caches of torch and of the Hugging Face hub.
    """
    from vse.features.settings.base import WEIGHT_FILE_SUFFIXES

    stem = model.rpartition("/")[2]
    torch_hub = Path(os.environ.get("TORCH_HOME", Path.home() / ".cache" / "torch")) / "hub" / "checkpoints"
    hugging_face = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "hub"
    candidates = [
        *torch_hub.glob(f"{stem}-*.pth"),
        *hugging_face.glob(f"models--{model.replace('/', '--')}"),
        *hugging_face.glob(f"models--{model.replace('/', '--')}.*"),  # timm adds the training data to the name
    ]
    if folder := os.environ.get("VSE_WEIGHTS_DIR"):
        candidates = [*(Path(folder, f"{stem}{suffix}") for suffix in ("", *WEIGHT_FILE_SUFFIXES)), *candidates]
    return next((path for path in candidates if path.exists()), None)

"""Shared fixtures, the profile of the property tests, and the check of types and shapes, which the tests alone have."""

from __future__ import annotations

import atexit
import gc
import os
import sys

gc.disable()  # until all tests are collected: it would go over millions of objects again and again
if "PYTEST_XDIST_WORKER" in os.environ:  # tests side by side would wait for each other's threads
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TORCHINDUCTOR_COMPILE_THREADS="1")

import jaxtyping  # noqa: E402

from tests import checked  # noqa: E402

checked.install()

import json  # noqa: E402
import shutil  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from random import Random  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
from filelock import FileLock  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests import hostile  # noqa: E402
from tests.docs.pages import console_scripts  # noqa: E402
from tests.faults.suite import Suite  # noqa: E402
from tests.forked import SNAKEMAKE, Scripts  # noqa: E402
from vse.features.settings.images import CnnConfig  # noqa: E402
from vse.pipeline.demo import create_demo  # noqa: E402

settings.register_profile(
    "vse",
    max_examples=10,
    deadline=None,  # a busy machine is not a failure
    derandomize=True,  # a run that fails fails again; other examples come with --hypothesis-profile=default
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("nightly", settings.get_profile("vse"), max_examples=100)
settings.load_profile("vse")

PYTEST = "pytest -m 'slow or not slow'"  # selects all tests, also those that setup.cfg leaves out


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let suites of faults try more, and write what they counted."""
    parser.addoption("--tries", type=int, default=0, help="the number of tries of each suite of faults [each suite's own]")
    parser.addoption("--counts", type=Path, help="CSV file that gets a row for each suite of faults")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs unless only the tests marked ``gpu`` run (``-m gpu``), and check the shapes of all calls at night."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("--hypothesis-profile") == "nightly":
        checked.CALLS = sys.maxsize


@pytest.hookimpl(tryfirst=True)  # before ``-m`` selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark most cases of long tests as nightly, and deselect tests that need a GPU unless ``-m gpu`` is given."""
    leave_cases_to_the_night(items)
    if config.option.markexpr != "gpu":
        needing = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]


def pytest_runtest_setup() -> None:
    """Check the shapes of the first calls of each function in each test."""
    checked.begin_test()


def leave_cases_to_the_night(items: list[pytest.Item]) -> None:
    """Mark suites of attacks as nightly, and all but n cases of each test that is marked ``sampled(n)``.

    A module with a constant ``SUITE`` is such a suite. The name of the test is the seed of the choice of its cases.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item.module, "SUITE"):
            item.add_marker(pytest.mark.nightly)
        elif item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, sampled in cases.items():
        (n_kept,) = next(sampled[0].iter_markers("sampled")).args
        kept = Random(name).sample(sampled, min(n_kept, len(sampled)))
        for item in sampled:
            if item not in kept:
                item.add_marker(pytest.mark.nightly)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays until the end: modules and tests, millions of objects."""
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # let what libraries clean up when Python ends be collected


TINY_FEATURE = CnnConfig(
    name="tiny", model="squeezenet1_1", layer="features.2", grid=2, weights="random", resize=32, crop=32, batch_size=8
)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``dataset.json`` of a demo of 66 images: 48 train, 6 val, 12 test. Read only."""
    return create_demo(tmp_path_factory.mktemp("demo") / "data", n_images=66)


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``dataset.json`` of a demo of 12 images: 9 train, 1 val, 2 test, for what is slow. Read only."""
    return create_demo(tmp_path_factory.mktemp("few") / "data", n_images=12)


@pytest.fixture(scope="session")
def cache(demo: Path) -> Path:
    """A cache of small features of the demo, in three shards. Read only."""
    from vse.features.extraction import extract_shards, merge_feature
    from vse.features.extractors.cnn import CnnExtractor

    out = demo.parent.parent / "features" / "demo_tiny.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE), out, 3)
    return merge_feature(demo, out, 3)


@pytest.fixture(autouse=True, scope="session")
def disks_are_not_waited_for() -> Iterator[None]:
    """What a flush to the disk adds is seen only when a machine loses its power; thousands of them take half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of our commands and of snakemake; all of them start at once, as forks of one process."""
    targets = console_scripts() | SNAKEMAKE
    if "PYTEST_XDIST_WORKER" not in os.environ:
        scripts = Scripts(targets, os.environ)
        scripts.start()
        yield scripts.bin
        scripts.close()
        return
    shared = tmp_path_factory.getbasetemp().parent / "commands"  # of all workers; the first that needs the process starts it
    with FileLock(shared.with_suffix(".lock")):
        if not shared.exists():
            scripts = Scripts(targets, os.environ, lifetime=os.getppid())
            scripts.start()
            scripts.close()
            shared.write_text(str(scripts.bin))
    yield Path(shared.read_text())


@pytest.fixture
def shapes_unchecked() -> Iterator[None]:
    """Switch the check of shapes off, so that a function's own error about them can be seen."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def own_demo(demo: Path, tmp_path: Path) -> Path:
    """A copy of the demo that a test may spoil."""
    shutil.copytree(demo.parent, tmp_path / "data")
    return tmp_path / "data" / "dataset.json"


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path) -> Path:
    """A copy of the demo and of its cache that a test may spoil; returns the cache."""
    shutil.copytree(cache.parent.parent, tmp_path / "own")
    return tmp_path / "own" / "features" / cache.name


@pytest.fixture
def edit() -> Callable[[Path, Callable[[Any], None]], Path]:
    """Change a JSON file in place."""

    def change(path: Path, how: Callable[[Any], None]) -> Path:
        content = json.loads(path.read_text())
        how(content)
        path.write_text(json.dumps(content))
        return path

    return change


@pytest.fixture
def suite_of_faults(request: pytest.FixtureRequest) -> Iterator[Callable[[str, int], Suite]]:
    """Start a suite by its name and its default number of tries; at the end of the test, check and save its counts."""
    suites: list[Suite] = []

    def start(name: str, tries: int) -> Suite:
        n_tries = request.config.getoption("tries") or tries
        node = request.node.nodeid.partition("[")[0]
        suites.append(Suite(name, n_tries, f"{PYTEST} {node} --tries {n_tries}"))
        return suites[-1]

    yield start
    for suite in suites:
        if counts := request.config.getoption("counts"):
            suite.save(counts)
        suite.check()


@pytest.fixture(scope="module", autouse=True)
def suite_of_module(request: pytest.FixtureRequest) -> Iterator[Suite | None]:
    """Count the tries of a module that has a constant ``SUITE``, hostile input among them, and save the counts at its end."""
    name, tries = getattr(request.module, "SUITE", None), request.config.getoption("tries")
    if name is None:
        yield None
        return
    command = f"{PYTEST} {request.node.nodeid}" + (f" --tries {tries}" if tries else "")
    suite = Suite(name, tries, command)
    with hostile.counted(suite):
        yield suite
    if counts := request.config.getoption("counts"):
        suite.save(counts)


def succeeds(command: Callable[[list[str]], None], *arguments: object) -> None:
    """Run a command that must exit with 0."""
    with pytest.raises(SystemExit) as stop:
        command([str(argument) for argument in arguments])
    assert stop.value.code == 0


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must exit with 2; returns its one line of error."""

    def run(main: Callable[[list[str]], None], *arguments: object) -> str:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if "error:" in line]
        assert stop.value.code == 2, captured.err
        assert len(lines) == 1
        assert captured.err.splitlines()[-1] == lines[0], "the error is the last line"
        return lines[0]

    return run

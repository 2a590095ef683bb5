"""Test the workflow with its files in a storage, with the commands of docs/storage.md and a demo of 33 images."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.workflow.pods import Pods
from tests.workflow.stores import Bucket, FolderStore, Store, read_page_options
from tests.workflow.test_workflow import DEMO, ROOT, Work
from vse.features.cache.feature_cache import verify_cache
from vse.pipeline.files.writing import parse_json

RESULT, CACHE = "results/demo_vsepp.json", "features/demo_fc7.h5"
SHARDS = [f"features/demo_fc7.shards/shard-{k:05d}-of-00002.h5" for k in range(2)]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Start an S3 server, yield its address, and set the variables of docs/storage.md for commands."""
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    thread = Thread(target=server.serve_forever)
    thread.start()
    settings = {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "ACCESS_KEY": "key", "SECRET_KEY": "secret"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(f"SNAKEMAKE_STORAGE_S3_{name}", value)
        yield settings["ENDPOINT_URL"]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def bucket(s3: str, tmp_path: Path) -> Bucket:
    name = tmp_path.name.replace("_", "-").lower()
    resource = boto3.resource(
        "s3", endpoint_url=s3, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
    )
    return Bucket(resource, name)


@pytest.fixture(params=["fs", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        return bucket
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed; the storage in a folder copies files with it")
    return FolderStore(tmp_path / "store")


class Machine(Work):
    """A working folder whose files are in a storage."""

    def __init__(self, folder: Path, commands: Path, store: Store) -> None:
        folder.mkdir()
        super().__init__(folder, commands)
        self._options = store.options

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return super().run(*arguments, *self._options)


@pytest.mark.nightly
def test_a_result_in_a_storage_is_that_of_a_working_folder_and_any_machine_continues(
    store: Store, commands: Path, tmp_path: Path
) -> None:
    (tmp_path / "local").mkdir()
    local = Work(tmp_path / "local", commands)
    local.make(RESULT)
    one, two, three = (Machine(tmp_path / name, commands, store) for name in ("one", "two", "three"))
    one.make_twice(RESULT)
    assert parse_json(Path(RESULT), store.read(RESULT))["protocols"] == local.json(RESULT)["protocols"]
    assert not [path for path in one.folder.iterdir() if path.name not in (".snakemake", "presets")]
    assert "Nothing to be done" in two.make(RESULT), "it has no local copies"

    shards = [store.read(shard) for shard in SHARDS]
    for name in (SHARDS[1], "runs/demo_vsepp/seed-0/test.h5", RESULT):
        store.delete(name)
    output = two.make(RESULT)
    assert ("shard 2 of 2" in output, "shard 1 of 2" in output) == (True, False)
    assert [store.read(shard) for shard in SHARDS] == shards

    three.make("results/demo_vsepp.html")
    page = store.read("results/demo_vsepp.html").decode()
    assert "data:image/jpeg" in page
    assert "no training curves" not in store.read("logs/report_demo_vsepp.log").decode()


@pytest.mark.nightly
def test_a_failed_job_stores_its_log_alone(store: Store, commands: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "one", commands, store)
    machine.make("data/demo/dataset.json")
    photo = next(name for name in sorted(store.names()) if name.endswith(".jpg"))
    content = store.read(photo)
    store.write(photo, content[:100])
    machine.make(SHARDS[0], expected=1)
    new = {name for name in store.names() if not name.startswith("data/")}
    assert new == {"logs/data_demo.log", "logs/extract_demo_fc7_00000-of-00002.log"}
    store.write(photo, content)
    machine.make_twice(SHARDS[0])


@pytest.mark.nightly
def test_machines_that_write_the_same_shard_write_the_same_bytes(store: Store, commands: Path, tmp_path: Path) -> None:
    """Extract each shard on both machines, always at the same time as the other shard."""
    one, two, other = (Machine(tmp_path / name, commands, store) for name in ("one", "two", "other"))
    one.make("data/demo/dataset.json")
    written = []
    for shards in (SHARDS, SHARDS[::-1]):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda machine, shard: machine.make(shard, "--force"), (one, two), shards))
        written.append([store.read(shard) for shard in SHARDS])
    assert written[0] == written[1]
    one.make_twice(CACHE)
    check = tmp_path / "check"
    for name in store.names():
        (check / name).parent.mkdir(parents=True, exist_ok=True)
        (check / name).write_bytes(store.read(name))
    verify_cache(check / CACHE)

    other.preset("datasets/demo", DEMO.replace("grid: 2", "grid: 1"))
    other.make(SHARDS[0], "--force")
    store.delete(CACHE)
    two.make(CACHE, expected=1)
    assert "made with other settings (content.config.grid: 2 -> 1)" in store.read("logs/merge_demo_fc7.log").decode()
    assert CACHE not in store.names()


@pytest.mark.nightly
def test_jobs_on_kubernetes_need_the_storage_and_an_image_alone(bucket: Bucket, commands: Path, tmp_path: Path) -> None:
    """Replace pods by processes in empty folders. Their commands, secrets and requests come from Snakemake's executor."""
    clone, binaries = tmp_path / "clone", tmp_path / "bin"
    shutil.copytree(ROOT / "pipeline" / "rules", clone / "pipeline" / "rules")
    shutil.copytree(ROOT / "profiles" / "kubernetes", clone / "profiles" / "kubernetes")
    shutil.copy(ROOT / "Snakefile", clone)
    binaries.mkdir()
    for name, line in {"python": f'exec {sys.executable} "$@"', "pip": ""}.items():  # pip would install plugins of this image
        (binaries / name).write_text(f"#!/bin/sh\n{line}\n")
        (binaries / name).chmod(0o755)
    machine = Work(tmp_path, commands)
    image = {
        "PATH": f"{binaries}:{commands}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / '_vse'}:{os.environ.get('PYTHONPATH', '')}",
        "VSE_PRESETS": str(machine.folder / "presets"),
    }
    pods = Pods(tmp_path / "pods", image)
    try:
        options = ["--workflow-profile", "profiles/kubernetes", "--default-storage-prefix", bucket.options[-1]]
        options += ["--jobs", "2", "--retries", "0", "--seconds-between-status-checks", "1", "--config", "threads=1"]
        done = subprocess.run(
            [sys.executable, "-m", "snakemake", *options, "--", RESULT],  # a fork would not read KUBECONFIG again
            cwd=clone,
            env={**os.environ, **image, "KUBECONFIG": str(pods.config_file)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr + pods.output()
    finally:
        pods.close()
    gpus = [job["resources"]["limits"].get("nvidia.com/gpu", "0") for job in pods.jobs]
    assert gpus == ["1", "1", "1", "1", "0"], "two shards, training and embedding, but not the evaluation"
    assert RESULT in bucket.names()


def test_the_profile_of_kubernetes_plans_jobs_that_use_the_storage_alone(commands: Path, tmp_path: Path) -> None:
    """Call a dry run, which reads the settings of the executor. A folder replaces the bucket."""
    work = Work(tmp_path, commands)
    profile = ["--workflow-profile", str(ROOT / "profiles" / "kubernetes")]
    text = work.plan("--verbose", *profile, *read_page_options("fs", "store"), "--", RESULT)
    jobs = {job.split(":")[0]: job for job in text.split("\nrule ")[1:]}
    assert jobs.keys() == {"demo", "extract", "merge", "train", "embed", "evaluate"}
    assert {name for name, job in jobs.items() if "gpu=1" in job} == {"extract", "train", "embed"}
    lists = [line for job in jobs.values() for line in re.findall(r"^    (?:input|output|log): (.+)", job, re.M)]
    files = [file for line in lists for file in re.split(r"(?<=\)), ", line)]
    assert all(re.fullmatch(r"store/\S+ \(.*(retrieve from|send to) storage.*\)", file) for file in files)

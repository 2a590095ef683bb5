"""The place of a process among those that a launcher started, as its variables tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training import forked
from tests.training.conftest import COMMAND, options, state
from vse.pipeline.errors import UserError
from vse.training.processes.launchers import find_launch, parse_first_host

LAUNCHERS = ["torchrun", "srun", "mpirun"]


def test_without_a_launcher_there_is_one_process() -> None:
    assert find_launch({}) is None
    assert find_launch({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None, "the script of sbatch"
    assert find_launch({"WORLD_SIZE": "1"}) is None
    assert find_launch(forked.variables("srun", 0, 1, "29500")) is None
    assert find_launch(forked.variables("mpirun", 0, 1, "29500")) is None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_gives_each_process_its_rank_and_all_the_same_address(launcher: str) -> None:
    found = [find_launch(forked.variables(launcher, rank, 3, "29500")) for rank in range(3)]
    assert [(one.rank, one.size, one.local_rank, one.local_size) for one in found if one] == [(k, 3, k, 3) for k in range(3)]
    assert len({(one.address, one.port) for one in found if one}) == 1
    for one in found:
        assert one is not None
        assert one.port == 29500


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_missing_variable_is_named(launcher: str) -> None:
    every = forked.variables(launcher, 1, 2, "29500")
    optional = {"torchrun": {"TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"}, "srun": {"SLURM_NTASKS"}, "mpirun": set()}[launcher]
    found_by = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}.get(launcher)
    for name in every.keys() - optional - {found_by}:
        rest = {key: value for key, value in every.items() if key != name}
        if launcher == "torchrun" or name not in ("MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"):
            with pytest.raises(UserError, match=f"{launcher} started this process, but the variable {name} is not set"):
                find_launch(rest)


@pytest.mark.parametrize(
    ("launcher", "name"), [("srun", "SLURM_JOB_ID"), ("srun", "SLURM_STEP_ID"), ("mpirun", "PMIX_NAMESPACE")]
)
def test_without_a_port_it_is_that_of_the_job(launcher: str, name: str) -> None:
    every = [forked.variables(launcher, rank, 2, "29500") for rank in range(2)]
    for one in every:
        del one["MASTER_PORT"]
    ports = {launch.port for one in every if (launch := find_launch(one))}
    assert len(ports) == 1
    assert 20_000 <= min(ports) < 30_000
    another = find_launch({**every[0], name: "8"})
    assert another is not None
    assert another.port not in ports
    del every[0][name]
    with pytest.raises(UserError, match=f"the variable {name} is not set"):
        find_launch(every[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_PROCID": "two"}, "SLURM_PROCID=two is not a number"),
        ({"SLURM_PROCID": "2"}, "rank 2 of 2 processes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, "rank 1 of 1 on this machine"),
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE=many is not a list of counts"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3, but SLURM_STEP_TASKS_PER_NODE has 1 nodes"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
    ],
)
def test_a_wrong_variable_is_named(changed: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_launch({**forked.variables("srun", 1, 2, "29500"), **changed})


def test_several_machines() -> None:
    nodes = {"SLURM_STEP_NODELIST": "gpu[07-08],cpu1", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NUM_TASKS": "5"}
    last = {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    found = find_launch({**forked.variables("srun", 4, 5, "29500"), **nodes, **last})
    assert found is not None
    assert (found.address, found.local_size) == ("gpu07", 1)
    two = {**forked.variables("mpirun", 1, 4, "29500"), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(UserError, match="MASTER_ADDR is not set; set it to the host name of the first process"):
        find_launch(two)
    found = find_launch({**two, "MASTER_ADDR": "gpu07"})
    assert found is not None
    assert found.address == "gpu07"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]node[04-08]", "rack1node04"),
        ("a-b.example.org", "a-b.example.org"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert parse_first_host(nodes) == host


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_two_processes_of_a_launcher_train_as_one(launcher: str, cache: Path, tmp_path: Path) -> None:
    rows = []
    for size in (1, 2):
        out = tmp_path / f"run-{size}"
        sets = ["--features", cache, "--out", out, "--threads", 1, *COMMAND, *options("train.epochs=1")]
        codes, told = forked.run_together(sets, size, tmp_path, launcher=launcher)
        assert codes == [0] * size, told
        assert told.count("epoch 1: loss") == 1
        rows.append(state(out))
    assert rows[1]["rows"][0]["loss"] == pytest.approx(rows[0]["rows"][0]["loss"], rel=1e-5)
    for name, weight in rows[0]["model"].items():
        torch.testing.assert_close(rows[1]["model"][name], weight, rtol=1e-4, atol=1e-5)

"""``precision: auto`` is bf16 where the device has it and fp32 elsewhere, and a cache records which of the two it was.

``ONEDNN_MAX_CPU_ISA`` and ``ATEN_CPU_CAPABILITY`` make a processor one without bf16, so that one machine stands for two.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY_FEATURE
from tests.features.conftest import Fails, extracted_cache, succeed
from tests.features.tiny_text import tiny_bert
from vse.features.backbones.device import choose_precision, has_bf16, parse_instruction_sets
from vse.features.cache.feature_cache import open_cache, verify_cache
from vse.features.cli import extract_main as main
from vse.features.extractors.cnn import CnnExtractor, rebuild_cnn_extractor
from vse.features.extractors.text import TextExtractor, rebuild_text_extractor
from vse.features.settings import load_feature_preset
from vse.features.settings.captions import TextConfig

CPU = torch.device("cpu")
AUTO: dict[str, Any] = {**TINY_FEATURE.model_dump(exclude={"name"}), "precision": "auto"}
needs_bf16 = pytest.mark.skipif(not has_bf16(CPU), reason="this processor has no bf16")


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


def command(dataset: Path, out: Path, *more: str) -> list[object]:
    """Extract in two shards by a preset of small features that leaves the precision to the machine."""
    file = out.with_name("tiny.yaml")
    file.write_text(json.dumps({"name": "tiny", **AUTO}))
    return ["cnn", "--dataset", dataset, "--feature", file, "--out", out, "--shards", "2", *more]


def test_the_choice_is_that_of_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    cpuinfo = Path("/proc/cpuinfo")
    here = parse_instruction_sets(cpuinfo.read_text()) if cpuinfo.is_file() else set()
    assert has_bf16(CPU) == bool(here & {"avx512_bf16", "amx_bf16", "bf16"})


@needs_bf16
def test_a_limit_of_onednn_or_pytorch_takes_bf16_away(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidding = ("AVX2", "avx2_vnni", "AVX512_CORE", "AVX512_CORE_VNNI")
    for most in (*forbidding, "AVX512_CORE_BF16", "AVX512_CORE_AMX", "AVX10_1_512", "DEFAULT"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
        assert has_bf16(CPU) == (most not in forbidding)
        assert choose_precision(CPU, "auto", "training") == ("fp32" if most in forbidding else "bf16")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not has_bf16(CPU)
    assert choose_precision(torch.device("meta"), "auto", "images") == "fp32"


def test_linux_names_the_instructions() -> None:
    for line in ("flags\t\t: fpu avx2 avx512_bf16 amx_bf16", "Features\t: fp asimd i8mm bf16", "model name\t: bf16"):
        names = set() if "model" in line else set(line.split(": ")[1].split())
        assert parse_instruction_sets(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n") == names


@pytest.mark.parametrize("work", ["training", "images", "texts"])
@pytest.mark.usefixtures("without_bf16")
def test_bf16_without_instructions_is_one_warning_with_a_factor(work: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_precision(CPU, "bf16", work) == "bf16"
    caplog.set_level(logging.WARNING)
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    caplog.clear()
    assert {"training": "linear layers", "images": "convolutional", "texts": "MiniLM"}[work] in record.getMessage()
    assert [choose_precision(CPU, asked, work) for asked in ("fp32", "auto")] == ["fp32", "fp32"]
    assert not caplog.records


@pytest.mark.parametrize("limited", [pytest.param(False, marks=needs_bf16), True])
def test_a_cache_records_its_precision(
    limited: bool, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if limited:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    used = "fp32" if limited else "bf16"
    out, named = tmp_path / "auto.h5", tmp_path / "named.h5"
    succeed(main, *command(few, out))
    assert f"auto.h5: computed in {used}" in capsys.readouterr().err
    succeed(main, *command(few, named, "--set", f"precision={used}"))
    one, other = verify_cache(out), verify_cache(named)
    assert one.provenance["config"]["precision"] == one.provenance["arithmetic"] == used
    assert one.key == other.key
    texts = [file.read_text() for file in out.with_suffix(".shards").glob("*.json")]
    assert len(texts) == 3
    assert not any("auto" in text for text in texts)


@pytest.mark.usefixtures("without_bf16")
def test_a_cache_of_another_machine_is_kept(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.h5"
    succeed(main, *command(few, out, "--set", "precision=bf16"))
    before = {file: file.read_bytes() for file in out.with_suffix(".shards").iterdir()}
    capsys.readouterr()
    succeed(main, *command(few, out))
    assert "finished, kept in bf16, the precision of another machine" in capsys.readouterr().err
    assert open_cache(out).provenance["config"]["precision"] == "bf16"
    assert {file: file.read_bytes() for file in out.with_suffix(".shards").iterdir()} == before


@pytest.mark.parametrize("names_shard", [True, False], ids=["one shard", "all shards"])
@pytest.mark.usefixtures("without_bf16")
def test_no_shard_in_another_precision_is_added(names_shard: bool, few: Path, tmp_path: Path, fails: Fails) -> None:
    out = tmp_path / "x.h5"
    succeed(main, *command(few, out, "--shard", "0", "--set", "precision=bf16"))
    line = fails(main, *command(few, out, *(["--shard", "1"] if names_shard else [])))
    assert "config.precision: bf16 -> fp32" in line
    assert "--set precision=bf16" in line
    assert len(list(out.with_suffix(".shards").glob("*.h5"))) == 1
    succeed(main, *command(few, out, "--set", "precision=bf16"))
    assert open_cache(out).provenance["config"]["precision"] == "bf16"


def test_shards_in_two_precisions_are_no_cache(few: Path, tmp_path: Path, fails: Fails) -> None:
    out = tmp_path / "x.h5"
    for shard, precision in enumerate(["fp32", "bf16"]):
        succeed(main, *command(few, out, "--shard", str(shard), "--set", f"precision={precision}"))
    line = fails(main, "merge", "--dataset", few, "--out", out, "--shards", 2)
    assert "--set precision=fp32 on each machine" in line
    assert "precision: fp32 in the preset of feature 'tiny'" in line
    assert not out.exists()


@pytest.mark.usefixtures("without_bf16")
def test_a_query_is_not_read_in_bf16_that_is_emulated(tmp_path: Path, few: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = extracted_cache(
        few, CnnExtractor(TINY_FEATURE.model_copy(update={"precision": "bf16"})), tmp_path / "demo_tiny.h5"
    )
    texts = TextConfig(name="text", model="tests/tiny", weights=str(tiny_bert(tmp_path / "tiny")), precision="bf16")
    captions = extracted_cache(few, TextExtractor(texts), tmp_path / "demo_text.h5")
    caplog.clear()
    assert TextExtractor(texts.model_copy(update={"precision": "auto"})).provenance["arithmetic"] == "fp32"
    assert rebuild_cnn_extractor(images).config.precision == "fp32"
    assert rebuild_text_extractor(captions).config.precision == "fp32"
    assert not [one for one in caplog.records if one.levelname == "WARNING" and one.name.startswith("vse")]


def test_what_makes_jobs_run_again_is_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_feature_preset("effnet_rc").list_rerun_settings()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert load_feature_preset("effnet_rc").list_rerun_settings() == before
    assert before["precision"] == "auto"

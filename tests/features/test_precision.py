"""``precision: auto`` is bf16 where the device has it and fp32 elsewhere, and a cache records which of the two it was.

``ONEDNN_MAX_CPU_ISA`` and ``ATEN_CPU_CAPABILITY`` make a processor one without bf16, so that one machine stands for two.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY_FEATURE
from tests.docs.pages import ROOT
from tests.features.tiny_text import tiny_bert
from vse.features.backbones.device import choose_precision, has_bf16, parse_cpuinfo
from vse.features.cache.feature_cache import FeatureCache, open_cache, verify_cache
from vse.features.cli import main
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.cnn import CnnExtractor, rebuild_cnn_extractor
from vse.features.extractors.text import TextExtractor, rebuild_text_extractor
from vse.features.settings import load_feature
from vse.features.settings.images import CnnConfig
from vse.features.settings.texts import TextConfig
from vse.pipeline.presets.presets import known_presets

CPU = torch.device("cpu")
AUTO: dict[str, Any] = {**TINY_FEATURE.model_dump(exclude={"name"}), "precision": "auto"}
ASKED = "import torch; from vse.features.backbones.device import has_bf16; print(has_bf16(torch.device('cpu')))"
needs_bf16 = pytest.mark.skipif(not has_bf16(CPU), reason="this processor has no bf16")


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the processor one with AVX2 alone for oneDNN."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    """Write a preset of small features that leaves the precision to the machine."""
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps({"name": "tiny", **AUTO}))
    return file


def extract(dataset: Path, preset: Path, out: Path, *more: str) -> None:
    """Run ``vse-extract cnn`` in two shards."""
    with pytest.raises(SystemExit, match="0"):
        main(_command(dataset, preset, out, *more))


def _command(dataset: Path, preset: Path, out: Path, *more: str) -> list[str]:
    return ["cnn", "--dataset", str(dataset), "--feature", str(preset), "--out", str(out), "--shards", "2", *more]


def precision_of(cache: Path) -> str:
    return str(open_cache(cache).provenance["config"]["precision"])


def test_the_choice_is_that_of_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    cpuinfo = Path("/proc/cpuinfo")
    here = parse_cpuinfo(cpuinfo.read_text()) if cpuinfo.is_file() else set()
    assert has_bf16(CPU) == bool(here & {"avx512_bf16", "amx_bf16", "bf16"})


@needs_bf16
def test_a_limit_of_pytorch_takes_bf16_away() -> None:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("most", "allowed"),
    [
        ("AVX2", False),
        ("avx2_vnni", False),
        ("AVX512_CORE", False),
        ("AVX512_CORE_VNNI", False),
        ("AVX512_CORE_BF16", True),
        ("AVX512_CORE_AMX", True),
        ("AVX10_1_512", True),
        ("DEFAULT", True),
    ],
)
@needs_bf16
def test_a_limit_of_onednn_takes_bf16_away(most: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    assert has_bf16(CPU) == allowed
    assert choose_precision(CPU, "auto", "training") == ("bf16" if allowed else "fp32")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 amx_bf16", {"fpu", "avx2", "avx512_bf16", "amx_bf16"}),
        ("Features\t: fp asimd i8mm bf16", {"fp", "asimd", "i8mm", "bf16"}),
        ("model name\t: bf16", set()),
    ],
)
def test_linux_names_the_instructions(line: str, names: set[str]) -> None:
    assert parse_cpuinfo(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n") == names


def test_a_device_of_another_kind_computes_in_fp32() -> None:
    assert choose_precision(torch.device("meta"), "auto", "images") == "fp32"


@pytest.mark.parametrize("work", ["training", "images", "texts"])
@pytest.mark.usefixtures("without_bf16")
def test_bf16_without_instructions_is_one_warning_with_a_factor(work: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_precision(CPU, "bf16", work) == "bf16"
    (record,) = warnings_of(caplog)
    assert {"training": "linear layers", "images": "convolutional", "texts": "MiniLM"}[work] in record.getMessage()
    assert [choose_precision(CPU, asked, work) for asked in ("fp32", "auto")] == ["fp32", "fp32"]
    assert len(warnings_of(caplog)) == 1


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_preset_asks_for_bf16_whatever_the_processor() -> None:
    files = [file for folder in ("experiments", "features", "datasets") for file in (ROOT / "config" / folder).glob("*.yaml")]
    assert files
    assert [file.name for file in files if "precision: bf16" in file.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("limited", [pytest.param(False, marks=needs_bf16), True])
def test_a_cache_records_the_precision_that_was_used(
    limited: bool, few: Path, preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if limited:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    used = "fp32" if limited else "bf16"
    out, named = tmp_path / "auto.h5", tmp_path / "named.h5"
    extract(few, preset, out)
    assert f"auto.h5: computed in {used}" in capsys.readouterr().err
    extract(few, preset, named, "--set", f"precision={used}")
    one, other = verify_cache(out), verify_cache(named)
    assert one.provenance["config"]["precision"] == one.provenance["arithmetic"] == used
    assert one.key == other.key
    texts = [file.read_text() for file in out.with_suffix(".shards").glob("*.json")]
    assert len(texts) == 3
    assert not any("auto" in text for text in texts)


def test_the_precision_is_part_of_the_key(few: Path, preset: Path, tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        extract(few, preset, tmp_path / f"{precision}.h5", "--set", f"precision={precision}")
    assert open_cache(tmp_path / "fp32.h5").key != open_cache(tmp_path / "bf16.h5").key


@pytest.mark.usefixtures("without_bf16")
def test_a_cache_of_another_machine_is_kept_in_its_precision(
    few: Path, preset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.h5"
    extract(few, preset, out, "--set", "precision=bf16")
    before = {file: file.read_bytes() for file in out.with_suffix(".shards").iterdir()}
    capsys.readouterr()
    extract(few, preset, out)
    assert "finished, kept in bf16, the precision of another machine" in capsys.readouterr().err
    assert precision_of(out) == "bf16"
    assert {file: file.read_bytes() for file in out.with_suffix(".shards").iterdir()} == before


@pytest.mark.parametrize("names_shard", [True, False], ids=["one shard", "all shards"])
@pytest.mark.usefixtures("without_bf16")
def test_a_shard_in_another_precision_is_not_added(
    names_shard: bool, few: Path, preset: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    out = tmp_path / "x.h5"
    extract(few, preset, out, "--shard", "0", "--set", "precision=bf16")
    line = fails(main, *_command(few, preset, out, *(["--shard", "1"] if names_shard else [])))
    assert "config.precision: bf16 -> fp32" in line
    assert "--set precision=bf16" in line
    assert len(list(out.with_suffix(".shards").glob("*.h5"))) == 1
    extract(few, preset, out, "--set", "precision=bf16")
    assert precision_of(out) == "bf16"


def test_shards_in_two_precisions_are_no_cache(few: Path, preset: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    out = tmp_path / "x.h5"
    for shard, precision in enumerate(["fp32", "bf16"]):
        extract(few, preset, out, "--shard", str(shard), "--set", f"precision={precision}")
    line = fails(main, "merge", "--dataset", few, "--out", out, "--shards", 2)
    assert "--set precision=fp32 on each machine" in line
    assert "precision: fp32 in the preset of feature 'tiny'" in line
    assert not out.exists()


@pytest.mark.usefixtures("without_bf16")
def test_networks_of_images_and_of_texts_follow_the_device(tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "tiny")
    text = TextExtractor(TextConfig(name="x", model="tests/tiny", weights=str(folder), precision="auto"))
    cnn = CnnExtractor(CnnConfig.model_validate({"name": "x", **AUTO}))
    assert (text.config.precision, cnn.config.precision) == ("fp32", "fp32")
    assert (text.notes["arithmetic"], cnn.notes["arithmetic"]) == ("fp32", "fp32")


@pytest.mark.usefixtures("without_bf16")
def test_a_query_is_not_read_in_bf16_that_is_emulated(tmp_path: Path, few: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = _extracted(few, CnnExtractor(TINY_FEATURE.model_copy(update={"precision": "bf16"})), tmp_path / "demo_tiny.h5")
    texts = TextConfig(name="text", model="tests/tiny", weights=str(tiny_bert(tmp_path / "tiny")), precision="bf16")
    captions = _extracted(few, TextExtractor(texts), tmp_path / "demo_text.h5")
    caplog.clear()
    assert rebuild_cnn_extractor(images).config.precision == "fp32"
    assert rebuild_text_extractor(captions).config.precision == "fp32"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def _extracted(dataset: Path, extractor: CnnExtractor | TextExtractor, out: Path) -> FeatureCache:
    extract_shards(dataset, extractor, out, 1)
    return open_cache(merge(dataset, out, 1))


@pytest.mark.parametrize("name", ["effnet_10c", "effnet_rc"])
def test_what_makes_jobs_run_again_is_the_same_on_every_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_feature(name).triggers()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert load_feature(name).triggers() == before
    assert before["precision"] == "auto"


def test_presets_of_papers_keep_fp32() -> None:
    papers = ["fc7", "resnet", "resnet_grid", "regions", "regions_adaptive", "boxes"]
    assert set(papers) <= set(known_presets("features"))
    assert {getattr(load_feature(name), "precision", None) for name in papers} == {"fp32"}

"""On a plain install the presets that need an extra say so in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vse.features.backbones.networks import load_backbone
from vse.features.settings.base import LIBRARIES
from vse.features.settings.images import CnnConfig
from vse.pipeline.errors import UserError

HIDDEN = """
import importlib.metadata, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("timm", "open_clip"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
known = importlib.metadata.version
def version(name):
    if name in ("timm", "open_clip_torch"):
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
from vse.features.cli import main
for preset in ("effnet", "clip"):
    try:
        main([*sys.argv[1:], "--feature", preset])
    except SystemExit as stop:
        assert stop.code == 2
"""


def test_a_missing_extra_is_one_line_that_names_it(demo: Path, tmp_path: Path) -> None:
    arguments = ["cnn", "--dataset", str(demo), "--out", str(tmp_path / "x.h5")]
    done = subprocess.run([sys.executable, "-c", HIDDEN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    effnet, clip = done.stderr.splitlines()
    assert "needs timm: pip install 'vse-pipeline[timm]'" in effnet
    assert "needs OpenCLIP: pip install 'vse-pipeline[openclip]'" in clip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["timm", "open_clip"])
def test_a_network_of_a_missing_library_is_refused_as_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LIBRARIES[name].module, None)
    with pytest.raises(UserError, match=rf"model {name}/x needs .*\[{LIBRARIES[name].extra}\]"):
        load_backbone(CnnConfig(name="x", model=f"{name}/x", weights="random"))

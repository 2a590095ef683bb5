"""Embeddings larger than the memory that a process may have for itself are evaluated from their file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vse.eval.files.embeddings import Embeddings, write_embeddings

# Private memory beyond what the imports take; the file is mapped, which is not counted.
LIMITED = """
import resource, sys
from pathlib import Path
from vse.eval.protocols.evaluate import evaluate_files
import torch
torch.mm(torch.ones(512, 64), torch.ones(64, 512))
status = Path("/proc/self/status").read_text().splitlines()
private = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (private + int(sys.argv[3]), resource.RLIM_INFINITY))
evaluate_files([Path(sys.argv[1])], Path(sys.argv[2]), "full")
"""


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits and their state are those of Linux")
def test_mapped_embeddings_need_no_memory_of_their_size(tmp_path: Path) -> None:
    n_images, each, dim = 2500, 4, 8192
    rng = np.random.default_rng(0)
    images = rng.standard_normal((n_images, dim), np.float32)
    image_of_caption = np.repeat(np.arange(n_images), each)
    captions = images[image_of_caption] + rng.standard_normal((n_images * each, dim), np.float32)
    ids = np.arange(n_images * each)
    run = Embeddings(ids[:n_images], ids, image_of_caption, "made", "test", images, captions, experiment="made", seed=0)
    file, out, limit = write_embeddings(tmp_path / "e.h5", run), tmp_path / "r.json", 340_000_000
    assert file.stat().st_size > 400_000_000
    subprocess.run([sys.executable, "-c", LIMITED, str(file), str(out), str(limit)], check=True)
    assert json.loads(out.read_text())["protocols"]["full"]["rsum"] == 600

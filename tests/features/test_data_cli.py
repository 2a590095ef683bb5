from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [["--help"], ["import-precomp", "--help"], ["import-npy"], ["import-tsv", "--match"]])
def test_help_and_usage_errors_do_not_import_what_reads_and_writes_caches(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom vse.features.data_cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert stop.code in (0, 2)\n"
        "print('heavy:', *sorted({'torch', 'torchvision', 'h5py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"

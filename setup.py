"""Build script. All metadata is in setup.cfg; with ``VSE_FAISS=cpu`` the package requires faiss-cpu on all platforms."""

import os
from configparser import ConfigParser

from setuptools import setup

settings = ConfigParser()
settings.read("setup.cfg", encoding="utf-8")
requirements = settings["options"]["install_requires"].split("\n")
if os.environ.get("VSE_FAISS") == "cpu":
    requirements = [line.partition(";")[0] if line.startswith("faiss-cpu") else line for line in requirements]
    requirements = [line for line in requirements if not line.startswith("faiss-gpu")]
setup(install_requires=requirements)

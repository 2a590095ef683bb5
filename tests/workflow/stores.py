"""Storages of the workflow for tests: a folder, and a bucket on a local S3 server."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Protocol

from tests.docs.pages import blocks

PAGE = "docs/storage.md"
PAGE_COMMAND = ["snakemake", "--cores", "8", "results/demo_vsepp.json"]


class Store(Protocol):
    """Objects by name, as ``results/demo_vsepp.json``, and the options with which the workflow uses them."""

    options: list[str]

    def names(self) -> set[str]: ...
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, content: bytes) -> None: ...
    def delete(self, name: str) -> None: ...


class FolderStore:
    """A storage in a folder, as a mounted file system is one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.options = folder, read_page_options("fs", str(folder))

    def names(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)

    def delete(self, name: str) -> None:
        (self.folder / name).unlink()


class Bucket:
    """A storage in a bucket, below a prefix."""

    def __init__(self, resource: Any, name: str) -> None:
        self._bucket, self.options = resource.Bucket(name), read_page_options("s3", f"s3://{name}/vse")

    def names(self) -> set[str]:
        return {item.key.removeprefix("vse/") for item in self._bucket.objects.all()}

    def read(self, name: str) -> bytes:
        content: bytes = self._bucket.Object(f"vse/{name}").get()["Body"].read()
        return content

    def write(self, name: str, content: bytes) -> None:
        self._bucket.Object(f"vse/{name}").put(Body=content)

    def delete(self, name: str) -> None:
        self._bucket.Object(f"vse/{name}").delete()


def read_page_options(provider: str, prefix: str) -> list[str]:
    """Return the options of the page's ``snakemake`` command for a provider, with another prefix."""
    commands = [shlex.split(line) for block in blocks(PAGE) if block.language == "sh" for line in block.commands]
    (words,) = (words for words in commands if words[:4] == PAGE_COMMAND and provider in words)
    return [*words[4:-1], prefix]

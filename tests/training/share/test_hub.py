"""A packed model is uploaded to a hub, and loaded from there. The hub is a server on loopback."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

import vse
from tests.training.conftest import Capture, Fails, Patch, done
from tests.training.share.conftest import TEXT, Travelled
from vse.cli import main
from vse.training.cli import search_main

COMMIT = "c" * 40


@dataclass
class Hub:
    """The repositories of the hub: their files by name. ``tokens`` has the authorisation of each request that writes."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)

    def post(self, path: str, body: bytes) -> object:
        """Return the answer of the hub to a request that writes."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, [asked.get("organization"), asked["name"]]))
            self.repositories.setdefault(name, {})
            return {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":  # of the model card
            return {"errors": [], "warnings": []}
        name, _, action = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        if action == "preupload":
            files = json.loads(body)["files"]
            return {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]}
        assert action == "commit"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.url}/{name}/commit/{COMMIT}"}

    def get(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        """Return a file or the list of files, and headers; None if there is none."""
        for name, files in self.repositories.items():
            if path.startswith(f"/api/models/{name}"):
                siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
                if "/tree/" in path:
                    listed = [
                        {"type": "file", "path": file, "size": len(content), "oid": "0"} for file, content in files.items()
                    ]
                    return json.dumps(listed).encode(), {}
                return json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(), {}
            file = path.removeprefix(f"/{name}/resolve/").partition("/")[2]
            if path.startswith(f"/{name}/resolve/") and file in files:
                etag = hashlib.sha256(files[file]).hexdigest()
                return files[file], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        return None


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state.tokens.add(self.headers["Authorization"])
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.answer(json.dumps(state.post(self.path.partition("?")[0], body)).encode(), {})

        def do_GET(self) -> None:
            found = state.get(self.path.partition("?")[0])
            if found is None:
                return self.send_error(404)
            return self.answer(*found)

        def do_HEAD(self) -> None:
            self.do_GET()

        def answer(self, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture
def reached(hub: Hub, monkeypatch: Patch) -> Hub:
    """The hub, whose address the library has, as if it had read it from HF_ENDPOINT when it was imported."""
    monkeypatch.setenv("HF_TOKEN", "hf_letters")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return hub


def test_a_model_is_pushed_and_loaded_by_its_name(reached: Hub, travelled: Travelled, capsys: Capture) -> None:
    hub = reached
    capsys.readouterr()
    done(main, "model", "push", travelled.packed, "someone/circles")
    assert capsys.readouterr().out == f"{hub.url}/someone/circles/commit/{COMMIT}\n"
    assert hub.tokens == {"Bearer hf_letters"}
    files = {file.relative_to(travelled.packed).as_posix(): file.read_bytes() for file in travelled.packed.rglob("*.*")}
    assert hub.repositories == {"someone/circles": files}
    for name in ("hf://someone/circles", f"hf://someone/circles@{COMMIT}"):
        found = vse.load(name).search(TEXT, k=3, corpus=travelled.album).frame["file"]
        assert [Path(file).name for file in found] == travelled.names[:3]


def test_what_is_wrong_with_a_name_or_a_folder_is_one_line(travelled: Travelled, tmp_path: Path, fails: Fails) -> None:
    assert "not a packed model" in fails(main, "model", "push", tmp_path, "someone/circles")
    assert "write user/name" in fails(main, "model", "push", travelled.packed, "circles")
    assert "write hf://user/name" in fails(search_main, "hf://circles", TEXT)
    assert "cannot get someone/circles from the Hugging Face hub" in fails(search_main, "hf://someone/circles", TEXT)

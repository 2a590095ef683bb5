"""A Kubernetes of one machine for tests: it runs the command of each job in a new, empty folder."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any


class Pods:
    """The part of the Kubernetes API that Snakemake's executor calls: secrets, jobs and their states."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir()
        self.folder, self.environment = folder, environment
        self.secrets: dict[str, dict[str, str]] = {}
        self.jobs: list[dict[str, Any]] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        pods = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pods.create(body, kind=self.path.rpartition("/")[2])
                self.answer(body)

            def do_GET(self) -> None:
                name = self.path.split("/")[-2]
                self.answer({"items": []} if "/pods" in self.path else {"status": pods.state(name)})

            def do_DELETE(self) -> None:
                self.answer({})

            def answer(self, body: object) -> None:
                content = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()
        cluster = {"name": "test", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
        users = [{"name": "test", "user": {}}]
        self.config_file = folder / "kubeconfig"
        self.config_file.write_text(
            json.dumps({"clusters": [cluster], "contexts": [context], "users": users, "current-context": "test"})
        )

    def create(self, body: Mapping[str, Any], kind: str) -> None:
        """Keep a secret, or start the command of a job in a folder of its own."""
        name = body["metadata"]["name"]
        if kind == "secrets":
            self.secrets[name] = {key: base64.b64decode(value).decode() for key, value in body["data"].items()}
            return
        container = body["spec"]["template"]["spec"]["containers"][0]
        self.jobs.append(container)
        references = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in container["env"]}
        secrets = {variable: self.secrets[entry["name"]][entry["key"]] for variable, entry in references.items()}
        work = self.folder / name
        work.mkdir()
        with (work / "output").open("wb") as output:
            self._processes[name] = subprocess.Popen(
                [*container["command"], *container["args"]],
                cwd=work,
                env={**self.environment, **secrets},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def state(self, name: str) -> dict[str, int]:
        """Return the status of a job as Kubernetes reports it."""
        code = self._processes[name].poll()
        return {} if code is None else {"failed" if code else "succeeded": 1}

    def output(self) -> str:
        """Return the output of all jobs."""
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("*/output")))

    def close(self) -> None:
        """End the server and the jobs that still run."""
        self._server.shutdown()
        self._server.server_close()
        for process in self._processes.values():
            process.kill()
            process.wait()

"""An API server of Kubernetes as far as `holdfast submit kubernetes` needs one, for a real `kubectl`.

It keeps objects and streams their changes. No controller runs: a test makes the pods and the conditions of the Job as
the job controller of Kubernetes 1.34 was seen to make them, and says what the pods have logged.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Tree = dict[str, Any]

# What the server can do, as `kubectl` asks for it.
_GROUPS: dict[str, Tree] = {
    "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.4"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
        {"name": "batch", "versions": [{"groupVersion": "batch/v1", "version": "v1"}],
         "preferredVersion": {"groupVersion": "batch/v1", "version": "v1"}}]},
}  # fmt: skip
_RESOURCES = {"/api/v1": ("v1", [("pods", "Pod"), ("services", "Service"), ("secrets", "Secret")]),
              "/apis/batch/v1": ("batch/v1", [("jobs", "Job")])}  # fmt: skip


# The server checks the fields of objects itself, so that `kubectl` need not.
_CHECKED = [("api/v1", "", "Service", "services"), ("apis/batch/v1", "batch", "Job", "jobs")]
_GROUPS["/openapi/v3"] = {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"} for path, *_ in _CHECKED}}
for _path, _group, _kind, _name in _CHECKED:
    _patch = {"parameters": [{"name": "fieldValidation", "in": "query"}], "responses": {},
              "x-kubernetes-group-version-kind": {"group": _group, "version": "v1", "kind": _kind}}  # fmt: skip
    _place = f"/{_path}/namespaces/{{namespace}}/{_name}/{{name}}"
    _about = {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.32.4"}}
    _GROUPS[f"/openapi/v3/{_path}"] = {**_about, "paths": {_place: {"patch": _patch}}}


class KubeApi:
    """`requests` are the methods and paths that were asked for."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.objects: dict[tuple[str, str], Tree] = {}  # By resource and name.
        self.events: list[tuple[str, str, Tree]] = []  # The type, the resource and the object.
        self.logs: dict[str, list[str | None]] = {}  # By pod; None is the end.
        self.requests: list[tuple[str, str]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": self}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def configuration(self, path: Path) -> Path:
        """A file for KUBECONFIG."""
        named = {"cluster": "test", "user": "test"}
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.server.server_port}"}}],
            "contexts": [{"name": "test", "context": named}], "users": [{"name": "test", "user": {}}],
        }))  # fmt: skip
        return path

    def put(self, event: str, resource: str, found: Tree) -> Tree:
        with self.changed:
            found["metadata"]["resourceVersion"] = str(len(self.events) + 1)
            self.events.append((event, resource, json.loads(json.dumps(found))))
            if event == "DELETED":
                self.objects.pop((resource, found["metadata"]["name"]), None)
            else:
                self.objects[resource, found["metadata"]["name"]] = found
            self.changed.notify_all()
        return found

    # What controllers and kubelets do.

    def pod(self, job: str, index: int, phase: str, code: int | None = None, **status: Any) -> None:
        """A pod of that number is in that phase. A new one if the last of the number has ended."""
        name, old = f"{job}-{index}", self.objects.get(("pods", f"{job}-{index}"))
        if old is None or old["status"]["phase"] in ("Failed", "Succeeded"):
            labels = {"batch.kubernetes.io/job-name": job}
            annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
            about = {"name": name, "namespace": "default", "uid": str(uuid.uuid4()), "labels": labels,
                     "annotations": annotations}  # fmt: skip
            spec = {"containers": [{"name": "node", "image": "x"}]}
            old = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec, "status": {}}
        if code is not None:
            ended = {"terminated": {"exitCode": code}}
            status["containerStatuses"] = [{"name": "node", "state": ended}]
        self.put("MODIFIED" if ("pods", name) in self.objects else "ADDED", "pods",
                 {**old, "status": {"phase": phase, **status}})  # fmt: skip

    def log(self, pod: str, *lines: str | None) -> None:
        with self.changed:
            self.logs.setdefault(pod, []).extend(lines)
            self.changed.notify_all()

    def end(self, job: str, kind: str, reason: str, message: str = "") -> None:
        found = self.objects["jobs", job]
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        self.put("MODIFIED", "jobs", {**found, "status": {"conditions": [condition]}})


class _Handler(BaseHTTPRequestHandler):
    api: KubeApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.api.requests.append(("GET", url.path))
        if url.path == "/openapi/v2":  # For lists, whose kind no resource has. An empty document in protobuf.
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif url.path in _GROUPS:
            self._answer(200, _GROUPS[url.path])
        elif url.path in _RESOURCES:
            version, kinds = _RESOURCES[url.path]
            verbs = ["create", "delete", "get", "list", "watch"]
            found = [{"name": name, "kind": kind, "namespaced": True, "verbs": verbs, "singularName": kind.lower()}
                     for name, kind in kinds]  # fmt: skip
            self._answer(200, {"kind": "APIResourceList", "groupVersion": version, "resources": found})
        elif url.path.endswith("/log"):
            self._stream_log(url.path.split("/")[-2])
        else:
            self._get_objects(url.path, query)

    def _get_objects(self, path: str, query: dict[str, str]) -> None:
        resource, name = self._place(path)
        wanted = query.get("fieldSelector", "").removeprefix("metadata.name=") or name
        label = query.get("labelSelector", "").partition("=")[2]
        with self.api.changed:
            found = [each for (kind, _), each in self.api.objects.items() if kind == resource
                     and (not wanted or each["metadata"]["name"] == wanted)
                     and (not label or label in (each["metadata"].get("labels") or {}).values())]  # fmt: skip
            version = str(len(self.api.events))
        if query.get("watch"):
            self._stream_events(resource, wanted, int(query.get("resourceVersion") or 0))
        elif name and not found:
            self._answer(404, _status(404, "NotFound", f'{resource} "{name}" not found'))
        elif name:
            self._answer(200, found[0])
        else:
            kind = {"pods": "PodList", "jobs": "JobList", "services": "ServiceList"}.get(resource, "List")
            self._answer(
                200, {"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": found}
            )

    def _stream_events(self, resource: str, wanted: str, seen: int) -> None:
        self._begin_stream("application/json")
        while True:
            with self.api.changed:
                while len(self.api.events) <= seen:
                    self.api.changed.wait()
                new, seen = self.api.events[seen:], len(self.api.events)
            for event, kind, found in new:
                if kind == resource and wanted in ("", found["metadata"]["name"]):
                    self._chunk(json.dumps({"type": event, "object": found}) + "\n")

    def _stream_log(self, pod: str) -> None:
        self._begin_stream("text/plain")
        shown = 0
        while True:
            with self.api.changed:
                while len(self.api.logs.get(pod, ())) <= shown:
                    self.api.changed.wait()
                line, shown = self.api.logs[pod][shown], shown + 1
            if line is None:
                self._chunk("")
                return
            self._chunk(f"{line}\n")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if body.startswith(b"k8s\0"):  # `kubectl create secret` speaks protobuf; its name is the longest short text.
            name = max(re.findall(rb"\x0a[\x01-\x3f]([a-z][-a-z0-9]+)", body), key=len).decode()
            found: Tree = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        else:
            found = json.loads(body)
        resource, _ = self._place(urlsplit(self.path).path)
        name = found["metadata"]["name"]
        self.api.requests.append(("POST", resource))
        if (resource, name) in self.api.objects:
            self._answer(409, _status(409, "AlreadyExists", f'{resource} "{name}" already exists'))
            return
        found["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": "default"}
        self._answer(201, self.api.put("ADDED", resource, found))

    def do_DELETE(self) -> None:
        if length := int(self.headers.get("Content-Length", 0)):
            self.rfile.read(length)
        resource, name = self._place(urlsplit(self.path).path)
        self.api.requests.append(("DELETE", f"{resource}/{name}"))
        if (resource, name) in self.api.objects:
            self.api.put("DELETED", resource, self.api.objects[resource, name])
        self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    # Small parts.

    def _place(self, path: str) -> tuple[str, str]:
        words = path.split("/namespaces/default/")[-1].split("/")
        return words[0], words[1] if len(words) > 1 else ""

    def _answer(self, code: int, body: Tree) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _begin_stream(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: str) -> None:
        """An empty one is the last."""
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def _status(code: int, reason: str, message: str) -> Tree:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


@contextmanager
def running() -> Iterator[KubeApi]:
    api = KubeApi()
    try:
        yield api
    finally:
        api.server.shutdown()
        api.server.server_close()

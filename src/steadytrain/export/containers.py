"""A container of the server: a Dockerfile, a Kubernetes manifest, and beside them the model and a wheel of steadytrain.

Files are rendered before any is written. The image is built from wheels only, with the steadytrain that wrote the
files; no package index is asked for it. It runs as a user without rights and needs no disk to write to but ``/tmp``.

>>> files = render("model.onnx", "steadytrain-0.2.0-py3-none-any.whl", image="registry.example.com/cats:1")
>>> sorted(files)
['Dockerfile', 'kubernetes.yaml']
>>> [line for line in files["Dockerfile"].splitlines() if line.startswith("USER")]
['USER 10001:10001']
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import steadytrain
from steadytrain.errors import InputError, storage_errors

PORT = 8000
USER = 10001
GRACE_SECONDS = 20
STOP_SECONDS = 5
"""That a pod waits before it stops the server: until no service sends it requests any more."""
EXTRAS = {".onnx": "export", ".xml": "openvino"}
"""Extras of steadytrain by the ending of the model's file, beside ``serve``."""

_CHECK = f"import urllib.request as request; request.urlopen('http://127.0.0.1:{PORT}/health', timeout=3)"


def render(
    model: str, wheel: str, *, image: str, words: Sequence[str] = (), grace_seconds: float = GRACE_SECONDS
) -> dict[str, str]:
    """Return the text of each file by its name.

    Args:
        model: name of the model's file, which lies beside them.
        wheel: name of steadytrain's wheel, which lies beside them, too.
        image: registry, name and tag of the container's image.
        words: more flags of ``steady serve``.
        grace_seconds: that the server has for requests at hand when it is stopped.
    """
    name = re.sub(r"[^a-z0-9]+", "-", image.rpartition("/")[2].partition(":")[0].lower())[:43].strip("-") or "steady"
    name = name if name[0].isalpha() else f"steady-{name}"  # a Service's name begins with a letter
    manifests = "---\n".join(
        yaml.safe_dump(manifest, sort_keys=False, width=200) for manifest in _manifests(name, image, grace_seconds)
    )
    return {"Dockerfile": _dockerfile(model, wheel, image, words), "kubernetes.yaml": manifests}


def write(
    folder: Path, model: Path, *, image: str, words: Sequence[str] = (), grace_seconds: float = GRACE_SECONDS
) -> list[Path]:
    """Write the files, the wheel and a copy of the model into a folder; return the paths. The rest: :func:`render`.

    Raises:
        InputError: the model is no file, or needs others (MXNet's), or steadytrain is not installed.
        StorageError: the folder cannot be written.
    """
    if not model.is_file():
        raise InputError(f"{model} is no file: export the model first (steady export), or name a run")
    if model.suffix == ".params":
        raise InputError(f"{model} needs other files beside it: export the model to one file first (steady export)")
    wheel, members = installed_wheel()
    texts = render(model.name, wheel, image=image, words=words, grace_seconds=grace_seconds)
    sources = [model, *(model.parent / name for name in _more_files(model.name))]
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        with zipfile.ZipFile(folder / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        for source in sources:
            if source.resolve().parent != folder.resolve():
                shutil.copyfile(source, folder / source.name)
    return [folder / name for name in (*texts, wheel, *(source.name for source in sources))]


def installed_wheel() -> tuple[str, dict[str, bytes]]:
    """Return the wheel of the steadytrain that is installed here: its file name, and its members by name.

    The native decoder is part of it where the installed one is of Linux, as containers are.
    https://packaging.python.org/specifications/binary-distribution-format

    Raises:
        InputError: it runs without having been installed.
    """
    try:
        installed = metadata.distribution("steadytrain")
    except metadata.PackageNotFoundError:
        raise InputError("this steadytrain is not installed, and a container needs its wheel: pip install it") from None
    tag = re.search(r"^Tag: (py3-none-\w*linux\w*)$", installed.read_text("WHEEL") or "", re.MULTILINE)
    name = f"steadytrain-{installed.version}"
    package = Path(steadytrain.__file__).parent
    members = {
        f"steadytrain/{path.relative_to(package)}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and (tag or not path.name.startswith("library.so"))
    }
    wheel_tag = tag[1] if tag else "py3-none-any"
    texts = {entry: installed.read_text(entry) or "" for entry in ("METADATA", "entry_points.txt")}
    texts["WHEEL"] = f"Wheel-Version: 1.0\nGenerator: steadytrain\nRoot-Is-Purelib: {not tag}\nTag: {wheel_tag}\n"
    members |= {f"{name}.dist-info/{entry}": text.encode() for entry, text in texts.items()}
    digests = {
        member: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        for member, data in members.items()
    }
    rows = [f"{member},sha256={digest},{len(members[member])}" for member, digest in digests.items()]
    record = f"{name}.dist-info/RECORD"
    members[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    return f"{name}-{wheel_tag}.whl", members


def _more_files(model: str) -> list[str]:
    """Return the names of files that belong to a model's file: of OpenVINO its weights, of TensorRT its description."""
    return {".xml": [Path(model).with_suffix(".bin").name], ".engine": [f"{model}.json"]}.get(Path(model).suffix, [])


def _dockerfile(model: str, wheel: str, image: str, words: Sequence[str]) -> str:
    extras = ",".join(["serve", *([EXTRAS[Path(model).suffix]] if Path(model).suffix in EXTRAS else [])])
    start = ["steady", "serve", f"/model/{model}", "--host", "0.0.0.0", "--port", str(PORT), *words]
    parts = [model, *_more_files(model), "/model/"]
    return f"""\
# docker build -t {image} .
# docker run --rm --read-only --tmpfs /tmp -p {PORT}:{PORT} {image}
FROM python:3.12-slim

# Small CPU builds of torch; leave the line out for GPUs.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,target=/build \\
    pip install --no-cache-dir --only-binary=:all: "/build/{wheel}[{extras}]"

COPY {json.dumps(parts)}
ENV HOME=/tmp PYTHONUNBUFFERED=1
USER {USER}:{USER}
EXPOSE {PORT}
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \\
    CMD {json.dumps(["python", "-c", _CHECK])}
ENTRYPOINT {json.dumps(start)}
"""


def _manifests(name: str, image: str, grace_seconds: float) -> list[dict[str, Any]]:
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "steady-serve"}
    meta = {"name": name, "labels": labels}
    probes = {
        # A large model is loaded and tried before the server is ready: two minutes.
        "startupProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 5},
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
    }
    container = {
        "name": "server",
        "image": image,
        "ports": [{"name": "http", "containerPort": PORT}],
        "env": [
            {
                "name": "STEADYTRAIN_TOKEN",  # kubectl create secret generic NAME-token --from-literal=token=...
                "valueFrom": {"secretKeyRef": {"name": f"{name}-token", "key": "token", "optional": True}},
            }
        ],
        **probes,
        # Batches are computed by as many threads as there are cores: whole ones.
        "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"cpu": "2", "memory": "4Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(STOP_SECONDS)]}}},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": math.ceil(STOP_SECONDS + grace_seconds + 5),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}}],
    }
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT), "prometheus.io/path": "/metrics"}
    deployment = {
        "replicas": 2,
        "selector": {"matchLabels": labels},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod},
    }
    service = {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": deployment},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
    ]

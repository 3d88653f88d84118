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
from string import Template

import steadytrain
from steadytrain.errors import InputError, storage_errors
from steadytrain.models.exported import engine_for, is_exported

PORT = 8000
USER = 10001
GRACE_SECONDS = 20
STOP_SECONDS = 5
"""Seconds that a pod waits before it stops the server: until no service sends it requests any more."""
TEXTS = Path(__file__).parent / "texts"


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
    row = engine_for(model) if is_exported(model) else None
    files = [model, *(path.name for path in (row.more_files(Path(model)) if row else ()))]
    values = {
        "name": name if name[0].isalpha() else f"steady-{name}",  # a Service's name begins with a letter
        "image": image,
        "port": PORT,
        "user": USER,
        "wheel": wheel,
        "extras": f"serve,{row.extra}" if row and row.extra else "serve",
        "files": json.dumps([*files, "/model/"]),
        "start": json.dumps(["steady", "serve", f"/model/{model}", "--host", "0.0.0.0", "--port", str(PORT), *words]),
        "stop_seconds": STOP_SECONDS,
        "end_seconds": math.ceil(STOP_SECONDS + grace_seconds + 5),
    }
    names = ("Dockerfile", "kubernetes.yaml")
    return {name: Template((TEXTS / name).read_text(encoding="utf-8")).substitute(values) for name in names}


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
    sources = [model, *(engine_for(model).more_files(model) if is_exported(model) else ())]
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

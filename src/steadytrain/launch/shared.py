"""Paths that a command reads and writes, beside the folders that the machines of a job share.

>>> job = Job(words=("train", "cats"), inputs=("cats",), outputs=("/data/a",))
>>> unshared(job, ["/data"])
('cats',)
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection
from pathlib import PurePosixPath

from steadytrain.errors import InputError
from steadytrain.launch.job import Job


def is_path(text: str) -> bool:
    """Return whether a text is a path, rather than a URI or another name with a scheme.

    >>> is_path("runs/a"), is_path("s3://bucket/a"), is_path("hf:timm/resnet50")
    (True, False, False)
    """
    return re.match(r"[A-Za-z][\w+.-]*:", text) is None


def unshared(job: Job, mounts: Collection[str], *, folder: str | None = None, copied: bool = False) -> tuple[str, ...]:
    """Return those paths of a job that its machines do not share.

    Args:
        mounts: folders of the machines that hold the same on all of them, and are kept.
        folder: the ranks' working directory, from which relative paths start; None: a folder of each machine's own.
        copied: the working directory is a copy of the one here, so that files in it can be read.
    """
    roots = [PurePosixPath(mount) for mount in (*mounts, *job.mounted)]
    wrong = []
    for path in dict.fromkeys((*job.inputs, *job.outputs)):
        place = PurePosixPath(posixpath.normpath(posixpath.join(folder or "", path)))
        if any(place.is_relative_to(root) for root in roots):
            continue
        is_copied = copied and path not in job.outputs and not place.is_absolute() and place.parts[:1] != ("..",)
        if not is_copied:
            wrong.append(path)
    return tuple(wrong)


def require_shared(
    job: Job, mounts: Collection[str], *, machines: str, remedy: str, folder: str | None = None, copied: bool = False
) -> None:
    """Refuse a job whose data or run is not on what its machines share.

    Args:
        machines: what they are called: ``pods``.
        remedy: how to mount the volume that holds them.

    Raises:
        InputError: names the paths, and where they have to be.
    """
    if not (wrong := unshared(job, mounts, folder=folder, copied=copied)):
        return
    where = sorted(mounts)[0] if mounts else "/data"
    examples = [f"{where}/{PurePosixPath(path).name}" for path in wrong if path not in job.outputs][:1]
    if outputs := [path for path in wrong if path in job.outputs]:
        name = PurePosixPath(outputs[0]).name
        is_run = job.words[0] in ("train", "finetune")
        examples += [f"--run {where}/runs/{'a' if name == 'runs' else name}" if is_run else f"{where}/{name}"]
    verb = "is" if len(wrong) == 1 else "are"
    reason = (
        f"not below {' or '.join(sorted(mounts))}, the only storage that the {machines} share: {remedy}, or"
        if mounts
        else f"on no volume that the {machines} share, and would be missing there or lost with them: {remedy}, and"
    )
    raise InputError(
        f"{' and '.join(wrong)} {verb} {reason} name {' and '.join(examples)}, for example"
        " (what the image itself has: --set 'mounted=[\"/FOLDER\"]')"
    )

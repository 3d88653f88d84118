"""Check that the paths which a job reads and writes lie on storage that all of its machines share."""

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


def require_shared(job: Job, mounts: Collection[str], *, machines: str, remedy: str, copied: bool = False) -> None:
    """Refuse a job whose data or run its machines do not share.

    Args:
        mounts: shared folders, as the machines name them; what is written there outlasts the job.
        machines: the launcher's word for its machines, such as ``pods``.
        remedy: how to mount the volume that holds them.
        copied: the working directory is a copy of the one here, so inputs inside it are there as well.

    Raises:
        InputError: names the paths, and an example of where they could be.
    """
    roots = [PurePosixPath(mount) for mount in (*mounts, *job.mounted)]

    def is_there(path: str) -> bool:
        place = PurePosixPath(posixpath.normpath(posixpath.join(job.folder or "", path)))
        is_inside = not place.is_absolute() and place.parts[:1] != ("..",)  # the working directory
        return any(map(place.is_relative_to, roots)) or (copied and is_inside and path not in job.outputs)

    if not (wrong := [path for path in dict.fromkeys((*job.inputs, *job.outputs)) if not is_there(path)]):
        return
    where = sorted(mounts)[0] if mounts else "/data"
    examples = [f"{where}/{PurePosixPath(path).name}" for path in wrong if path not in job.outputs][:1]
    if outputs := [path for path in wrong if path in job.outputs]:
        name = PurePosixPath(outputs[0]).name
        is_run = job.words[0] in ("train", "finetune")
        examples += [f"--run {where}/runs/{'a' if name == 'runs' else name}" if is_run else f"{where}/{name}"]
    subject = f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'}"
    advice = f"name {' and '.join(examples)}, for example (what the image itself has: --set 'mounted=[\"/FOLDER\"]')"
    reason = f"on no volume that the {machines} share, and would be missing there or lost with them"
    if mounts:
        reason = f"not below {' or '.join(sorted(mounts))}, the only storage that the {machines} share"
    raise InputError(f"{subject} {reason}: {remedy}, {'or' if mounts else 'and'} {advice}")

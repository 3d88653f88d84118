"""The doctor's answer as one JSON document, and back for comparing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from steadytrain.config.plain import plain
from steadytrain.doctor.facts import Facts
from steadytrain.doctor.finding import Finding
from steadytrain.errors import InputError

KIND, VERSION = "steadytrain doctor", 1
_REMEDY = "write one with: steady doctor --json > other.json"


def document(facts: Facts, found: Iterable[Finding]) -> dict[str, Any]:
    """Kind, version, the time, what was found, and each part of the facts under its name."""
    made = datetime.now(UTC).isoformat(timespec="seconds")
    told: dict[str, Any] = plain(facts)
    return {"kind": KIND, "version": VERSION, "made": made, "findings": [plain(one) for one in found], **told}


def read(path: Path) -> dict[str, Any]:
    """A document from a file.

    Raises:
        InputError: the file cannot be read, or is something else.
    """
    try:
        told = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON document: {_REMEDY}") from error
    if not isinstance(told, dict) or told.get("kind") != KIND:
        kind = told.get("kind") if isinstance(told, dict) else None
        what = f"is of the kind {kind!r}" if isinstance(kind, str) else "was not written by steady doctor"
        raise InputError(f"{path} {what}, and not {KIND!r}: {_REMEDY}")
    if told.get("version") != VERSION:
        raise InputError(f"{path} has version {told.get('version')!r}; this steadytrain reads {VERSION}: {_REMEDY}")
    return told

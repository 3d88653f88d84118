"""The document: stable keys, and what is no such document is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.doctor.test_text import full

from steadytrain.doctor import Facts, document, findings, read
from steadytrain.doctor.facts import Place
from steadytrain.errors import InputError

PARTS = ("system", "processor", "load", "memory", "places", "limits", "allocator", "variables", "torch", "accelerators")


def test_the_keys_are_the_same_on_every_machine() -> None:
    empty, told = document(Facts(), []), document(full(), findings(full()))
    assert list(told)[:4] == ["kind", "version", "made", "findings"]
    assert (told["kind"], told["version"]) == ("steadytrain doctor", 1)
    assert list(empty) == list(told) == ["kind", "version", "made", "findings", *PARTS, "decoders", "packages"]
    assert all(empty[part].keys() == told[part].keys() for part in ("system", "processor", "memory", "torch", "load"))
    assert list(told["findings"][0]) == ["rule", "severity", "what", "why", "remedy"]


def test_what_is_unknown_is_null_and_not_zero() -> None:
    told = document(Facts(places={"cache": Place(path="/c")}), [])
    assert told["places"]["cache"]["free_bytes"] is None and told["processor"]["quota"] is None
    assert told["accelerators"]["on_bus"] is None


def test_a_document_comes_back_from_its_file(tmp_path: Path) -> None:
    told = document(full(), findings(full()))
    (tmp_path / "a.json").write_text(json.dumps(told))
    assert read(tmp_path / "a.json") == json.loads(json.dumps(told))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is no JSON document"),
        ("steady: nothing", "is no JSON document"),
        ("[1, 2]", "was not written by steady doctor"),
        ('{"a": 1}', "was not written by steady doctor"),
        ('{"kind": "steadytrain doctor comparison", "version": 1}', "is of the kind 'steadytrain doctor comparison'"),
        ('{"kind": "steadytrain doctor", "version": 2}', "has version 2; this steadytrain reads 1"),
        ("[" * 100_000, "is no JSON document"),
    ],
)
def test_another_file_is_refused_with_what_to_do(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(InputError) as refused:
        read(tmp_path / "other.json")
    message = str(refused.value)
    assert says in message and message.endswith("write one with: steady doctor --json > other.json")
    assert "\n" not in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*gone\.json \(No such file"):
        read(tmp_path / "gone.json")
    with pytest.raises(InputError, match="Is a directory"):
        read(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00nonsense")
    with pytest.raises(InputError, match="is no JSON document"):
        read(tmp_path / "bytes.json")

"""Kinds of findings: each is on its page, as it is, and severities add up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steadytrain.data.checking.findings import KINDS, SEVERITIES, Finding, Findings, Report

PAGE = Path(__file__).parents[3] / "docs" / "check.md"


def test_docs_page_describes_every_kind() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert [(name, severity, title) for name, severity, title, _ in rows] == [
        (name, kind.severity, kind.title) for name, kind in KINDS.items()
    ]
    times = {name: then for name, _, _, then in rows}
    assert times == {
        name: f"{kind.then}; of a source: {kind.packed}" if kind.packed else kind.then for name, kind in KINDS.items()
    }


@pytest.mark.parametrize("name", KINDS)
def test_what_becomes_of_it_is_a_few_plain_words(name: str) -> None:
    for words in (KINDS[name].title, KINDS[name].then, KINDS[name].packed):
        assert len(words) <= 72
        assert not words.endswith(".")


def test_errors_come_first_and_every_one_is_counted() -> None:
    findings = Findings(most=2)
    for record in range(5):
        findings.add("duplicate", record=record)
        findings.add("leak", record=record)
    findings.add("no-image", "an HTML page", offset=8, record=1, id=7)
    assert [(kind, count, len(kept)) for kind, count, kept in findings.by_kind()] == [
        ("no-image", 1, 1),
        ("leak", 5, 2),
        ("duplicate", 5, 2),
    ]
    assert [findings.num(severity) for severity in SEVERITIES] == [1, 5, 5]


def test_finding_leaves_out_unknown_fields() -> None:
    assert Finding("no-image", record=0, offset=0).to_dict() == {
        "kind": "no-image",
        "severity": "error",
        "offset": 0,
        "record": 0,
    }


def test_notes_alone_are_fine_and_warnings_are_usable() -> None:
    def report(*kinds: str) -> Report:
        findings = Findings()
        for kind in kinds:
            findings.add(kind)
        return Report(path="a", what="b", findings=findings)

    assert (report("cmyk").is_fine, report("cmyk").is_usable) == (True, True)
    assert (report("leak").is_fine, report("leak").is_usable) == (False, True)
    assert (report("leak", "refused").is_fine, report("leak", "refused").is_usable) == (False, False)

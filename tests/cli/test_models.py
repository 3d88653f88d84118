"""``steady models`` as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from steadytrain.cli import main


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that is empty before the first test: what one test has counted, the others recall."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def _own_caches(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(cache))
    monkeypatch.setenv("TORCH_HOME", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    """What a command that must succeed wrote to standard output and standard error."""
    assert main(["models", *argv]) == 0
    return capsys.readouterr()


def test_a_table_with_a_line_for_each_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path))
    out, err = shown(capsys, "resnet[25]0")
    assert out.splitlines() == [
        "model          parameters  GMACs  input  weights  licence",
        "resnet20           0.27 M  0.041     32  none     -",
        "timm/resnet50     25.56 M   4.09    224  hub      apache-2.0",
    ]
    assert err.startswith("counting: done=2 total=2 ")
    assert shown(capsys, "resnet[25]0") == (out, "")  # it is remembered


def test_json_is_one_document_with_all_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capsys, "timm/resnet18", "--json")
    document = json.loads(out)
    assert (document["counted"], document["n"]) == (True, len(document["models"]))
    assert document["models"][0] == {
        "name": "timm/resnet18",
        "height": 224,
        "width": 224,
        "channels": 3,
        "num_classes": 1000,
        "weights": "hub",
        "tag": "a1_in1k",
        "licence": "apache-2.0",
        "restriction": None,
        "parameters": 11_689_512,
        "macs": 1_814_073_344,
        "flops": 3_628_146_688,
        "error": None,
    }


def test_restricted_licences_are_marked_and_the_marks_explained(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = shown(capsys, "convnextv2_atto.fcmae_ft_in1k")
    assert "hub      ! cc-by-nc-4.0\n" in out
    assert "! non-commercial: these weights may not be used in products or services\n" in err
    out, err = shown(capsys, "fastvit_t8")
    assert "hub      ? fastvit-license\n" in out
    assert "? unknown or custom licence" in err


def test_all_names_are_listed_without_counting_and_the_way_to_the_counts_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, err = shown(capsys)
    lines = out.splitlines()
    assert len(lines) > 1000
    assert lines[0].split() == ["model", "input", "weights", "licence"]
    assert f"{len(lines) - 1:,} models; parameters and GMACs are counted for up to 60: narrow the pattern" in err
    assert "--all" in err
    document = json.loads(shown(capsys, "--json")[0])
    assert not document["counted"]
    assert {model["parameters"] for model in document["models"]} == {None}


@pytest.mark.parametrize(
    ("pattern", "sort"),
    [pytest.param("mobilenetv[12]*", "parameters", marks=pytest.mark.slow), ("mobilenetv2*", "flops")],
)
def test_sorted_the_smallest_comes_first(capsys: pytest.CaptureFixture[str], pattern: str, sort: str) -> None:
    models = json.loads(shown(capsys, pattern, "--sort", sort, "--json")[0])["models"]
    values = [model[sort] for model in models]
    assert len(values) > 5
    assert values == sorted(values)
    assert [model["name"] for model in models] != sorted(model["name"] for model in models)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["resnett50"], "no model matches 'resnett50'. Did you mean resnet50"),
        (["mobilenetv2_035", "--weights"], "no weights match 'mobilenetv2_035'"),
        (["--sort", "flops"], "--sort flops needs all 1,"),
        (["--sort", "size"], "Choose from: name, parameters, flops"),
    ],
)
def test_errors_are_one_line_with_the_remedy(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(["models", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("steady: ")
    assert message in err.replace('"', "")


@pytest.mark.parametrize("columns", [60, *(pytest.param(columns, marks=pytest.mark.slow) for columns in (80, 120))])
@pytest.mark.parametrize("pattern", ["fastvit_t", "convnextv2_tiny.", "vit_base_patch16_sapiens2"])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pattern: str, columns: int
) -> None:
    wide = json.loads(shown(capsys, pattern, "--json")[0])["models"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    out, _ = shown(capsys, pattern)
    assert max(map(len, out.splitlines())) <= columns
    assert {row["name"] for row in wide} <= set(out.split())

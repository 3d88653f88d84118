"""Whether two models differ: exact probabilities, the same images, a plain verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadytrain.cli import main
from steadytrain.data.results.predictions import HEAD
from steadytrain.errors import InputError
from steadytrain.reports.comparison import compare, mcnemar


def write(path: Path, right: list[bool]) -> Path:
    rows = [
        f"{k}.png,a.rec,{k},cat,{'cat' if ok else 'dog'},0.5,0.5,0.7,{1 if ok else 2}" for k, ok in enumerate(right)
    ]
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return path


@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 0), (10, 25), (25, 10), (300, 340), (2000, 2400)])
def test_the_probability_is_that_of_the_exact_binomial_test(a: int, b: int) -> None:
    from scipy.stats import binomtest

    expected = binomtest(a, a + b, 0.5).pvalue if a + b else 1.0
    assert mcnemar(a, b) == pytest.approx(expected, rel=1e-9)


def test_a_difference_is_shown_or_not_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.csv", [True] * 60 + [False] * 40)
    b = write(tmp_path / "b.csv", [True] * 80 + [False] * 20)
    c = write(tmp_path / "c.csv", [True] * 58 + [False] * 40 + [True] * 2)
    better, same = compare(a, b), compare(a, c)
    assert better.verdict == f"{b} is better than {a}: 80.0 % against 60.0 %, p < 0.001"
    assert compare(b, a).verdict == better.verdict
    assert (better.only_a, better.only_b) == (0, 20) and 0.12 <= better.gain.low < 0.2 < better.gain.high <= 0.28
    assert same.verdict.startswith("no difference can be shown: 60.0 %") and same.p == 1
    assert same.gain.low < 0 < same.gain.high
    assert main(["report", str(a), str(b), "--compare"]) == 0
    assert capsys.readouterr().out.startswith(better.verdict)
    assert main(["report", str(a), str(b), "--compare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == better.verdict


def test_other_images_are_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.csv", [True] * 5), write(tmp_path / "b.csv", [True] * 6)
    with pytest.raises(InputError, match=r"other images .5 in common of 5 and 6"):
        compare(a, b)
    with pytest.raises(InputError, match="--per-image"):
        compare(a, tmp_path / "missing.csv")

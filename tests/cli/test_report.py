"""``steady report`` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.reports.runs import finished, recipe, restarted

from steadytrain.cli import main
from steadytrain.run import Run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs in ``runs/`` of the working directory."""
    finished(tmp_path / "runs")
    restarted(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_page_is_written_and_a_line_for_each_run_printed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs"]) == 0
    out, err = capsys.readouterr()
    first, second = out.split("\n\n")
    assert [line.split()[0] for line in first.splitlines()] == ["run", "baseline", "restarted"]
    assert [line.split()[0] for line in second.splitlines()] == ["run", "baseline", "restarted"]
    assert err == "wrote report.html\n"
    assert (runs / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["r.html", "r.md", "r.csv", "r.json", "R.MD"])
def test_the_ending_chooses_the_format(runs: Path, name: str) -> None:
    assert main(["report", "runs/baseline", "-o", name]) == 0
    start = (runs / name).read_text()[:15]
    assert start.startswith(
        {"html": "<!doctype", "md": "<!-- steadytrai", "csv": "run,epoch,", "json": "{"}[name[2:].lower()]
    )


def test_a_dash_prints_markdown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs/baseline", "-o", "-"]) == 0
    assert "## Epochs of baseline" in capsys.readouterr().out
    assert not (runs / "report.html").exists()


def test_json_is_one_document_and_writes_nothing_by_itself(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in document["runs"]] == ["baseline", "restarted"]
    assert not (runs / "report.html").exists()
    assert main(["report", "runs", "--json", "-o", "r.csv"]) == 0
    assert (runs / "r.csv").exists()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "no run named: steady report RUN..., or a folder of runs: steady report runs/"),
        (["runs/baselin"], 2, "runs/baselin does not exist. Did you mean baseline?"),
        (["runs/empty"], 2, "runs/empty has no events yet"),
        (["runs", "-o", "r.htm"], 2, "Did you mean .html?"),
        (["runs", "-o", "no/r.html"], 2, "the folder no does not exist: make it"),
        (["runs", "-o", "thesis.md"], 2, "thesis.md exists and is not a report"),
        (["runs", "-o", "/proc/r.md"], 1, "cannot write /proc/r.md"),
    ],
)
def test_errors_are_one_line_with_the_remedy(
    runs: Path, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, message: str
) -> None:
    Run.create(runs / "runs" / "empty", recipe())
    (runs / "thesis.md").write_text("chapter 1")
    assert main(["report", *argv]) == code
    out, err = capsys.readouterr()
    assert out == ""
    *_, last = err.splitlines()
    assert last.startswith("steady: ")
    assert message in last
    assert "Traceback" not in err


def test_a_run_without_events_in_a_folder_is_left_out_aloud(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run.create(runs / "runs" / "empty", recipe())
    assert main(["report", "runs", "-o", "-"]) == 0
    assert capsys.readouterr().err == "left out runs/empty: it has no events yet\n"


def test_tables_need_no_torch_numpy_jinja_or_plotly(runs: Path) -> None:
    code = (
        "import sys; from steadytrain.cli import main; main(['report', 'runs', '-o', '-']);"
        "sys.exit(str({'torch', 'numpy', 'jinja2', 'plotly', 'rich.live'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=runs, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_a_page_needs_no_torch_or_numpy(runs: Path) -> None:
    code = (
        "import sys; from steadytrain.cli import main; main(['report', 'runs']);"
        "sys.exit(str({'torch', 'numpy'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=runs, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines() == ["wrote report.html", ""]

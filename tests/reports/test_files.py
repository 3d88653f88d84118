"""Which runs a path means, and what is never overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.reports.runs import finished, recipe

from steadytrain.errors import InputError, RunError, StorageError
from steadytrain.reports import report
from steadytrain.reports.files import find, kind_of, names, write
from steadytrain.run import Run


def test_a_folder_stands_for_the_runs_in_it_and_says_what_it_left_out(tmp_path: Path) -> None:
    for name in ("b", "a"):
        finished(tmp_path, name)
    Run.create(tmp_path / "new", recipe())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "recipe.json").write_text("{")
    selection = find([tmp_path])
    assert [run.name for run in selection.runs] == ["a", "b"]
    assert [line.split(":")[0].rsplit("/")[-1] for line in selection.notes] == ["broken", "new"]


def test_repeats_are_found_in_the_folder_of_runs(tmp_path: Path) -> None:
    for seed in (0, 1):
        finished(tmp_path / "runs" / "a", f"seed-{seed}")
    finished(tmp_path / "runs", "b")
    assert [run.name for run in find([tmp_path / "runs"]).runs] == ["seed-0", "seed-1", "b"]


def test_run_named_twice_is_listed_once(tmp_path: Path) -> None:
    run = finished(tmp_path)
    assert len(find([tmp_path, run.directory, str(run.directory) + "/"]).runs) == 1


def test_runs_of_equal_names_get_different_labels(tmp_path: Path) -> None:
    runs = [finished(tmp_path / folder, name) for folder, name in (("x", "a"), ("y", "a"), ("y", "b"))]
    assert names(runs) == ["x/a", "y/a", "b"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "does not exist"),
        ("baselin", "Did you mean baseline?"),
        ("baseline/events.jsonl", "is a file: name the run's folder"),
        ("baseline/checkpoints", "is not a run"),
    ],
)
def test_path_without_a_run_is_refused_with_a_hint(tmp_path: Path, path: str, message: str) -> None:
    finished(tmp_path)
    with pytest.raises(RunError, match=message.replace("?", r"\?")):
        find([tmp_path / path])


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.htm", "Did you mean .html?"), ("a", "ends in no suffix"), ("a.pdf", "a report ends in .html")],
)
def test_an_unknown_ending_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        kind_of(Path(name))
    assert message in str(raised.value)


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"name a file, such as -o .*report\.html"):
        kind_of(tmp_path)


@pytest.mark.parametrize("name", ["r.html", "r.md", "r.csv", "r.json"])
def test_an_older_report_is_replaced_and_other_files_only_with_force(tmp_path: Path, name: str) -> None:
    run, output = finished(tmp_path), tmp_path / name
    report([run], output)
    first = output.read_bytes()
    report([run.directory], output)
    assert len(output.read_bytes()) == len(first)
    output.write_text("my thesis")
    with pytest.raises(InputError, match="is not a report: choose another -o, or add --force"):
        report([run], output)
    assert output.read_text() == "my thesis"
    assert report([run], output, force=True).stat().st_size == len(first)


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    run = finished(tmp_path)
    report([run], tmp_path / "r.md")
    with pytest.raises(InputError, match="does not exist: make it"):
        write(tmp_path / "no" / "r.md", "x")
    with pytest.raises(StorageError):
        write(Path("/proc/r.md"), "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["baseline", "r.md"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.md").symlink_to(tmp_path / "real.md")
    write(tmp_path / "link.md", "text")
    assert (tmp_path / "link.md").is_symlink()
    assert (tmp_path / "real.md").read_text() == "text"


def test_names_that_are_no_utf8_do_not_stop_a_report(tmp_path: Path) -> None:
    write(tmp_path / "r.md", "a\udcffb")
    assert (tmp_path / "r.md").read_text() == "a?b"

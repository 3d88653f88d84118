"""A run's folder: whose it is, what it refuses, and that a copy of it is a run as well."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.forked import start

from steadytrain.config import Budget, Data, Model, Recipe
from steadytrain.errors import RunError, StorageError
from steadytrain.events import Ended, Failed, Noticed, Started
from steadytrain.files import replace_file
from steadytrain.run import Run
from steadytrain.training.loop.attempt import _locked

RECIPE = Recipe(data=Data(train="train.rec"), model=Model("mlp"), budget=Budget(epochs=2))

HOLDER = """
import sys, time
from steadytrain.run import Run
with Run.open(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "a", RECIPE)


@contextlib.contextmanager
def _holder(run: Run) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(run.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        try:
            yield child
        finally:
            child.kill()


def test_a_run_opens_as_it_was_created(run: Run) -> None:
    assert Run.open(run.directory) == run
    assert run.checkpoints.is_dir()
    assert (run.name, run.weights.name) == ("a", "model.safetensors")
    assert list(run.events()) == []
    assert run.finished() is None


def test_the_same_recipe_takes_the_run_up_again_with_its_new_settings(run: Run) -> None:
    faster = RECIPE.with_({"parallel.threads": 3, "every.keep": 5})
    assert Run.create(run.directory, faster).recipe == faster
    assert Run.open(run.directory).recipe == faster


def _start(run: Run) -> None:
    with run.log() as log:
        log.append(Started(digest="", step=0, steps=1, steps_per_epoch=1.0, batch_size=1))


def test_the_process_that_holds_a_run_is_known(run: Run) -> None:
    assert run.holder() is None
    with run.lock():
        assert run.holder() == os.getpid()
    with _holder(run) as child:
        assert run.holder() == child.pid


def test_whether_a_run_is_held_is_seen_without_touching_it(run: Run) -> None:
    assert not run.is_held()
    with _holder(run) as child:
        assert run.is_held()
        child.kill()
        child.wait()
        before = (run.directory / "lock").read_bytes(), (run.directory / "lock").stat().st_mtime_ns
        assert not run.is_held()
        assert ((run.directory / "lock").read_bytes(), (run.directory / "lock").stat().st_mtime_ns) == before


def test_what_is_measured_beside_a_run_belongs_to_no_attempt(run: Run) -> None:
    _start(run)
    with run.log_beside() as log:
        log.append(Noticed(message="measured", step=0))
    _start(run)
    assert [event.attempt for event in run.events()] == [1, 0, 2]


def test_a_run_that_never_started_takes_another_recipe(run: Run) -> None:
    changed = RECIPE.with_({"optim.lr": 0.5})
    with run.log() as log:
        log.append(Failed(error="RecipeError", message="no such device", step=0))
    assert Run.create(run.directory, changed).recipe == changed
    assert Run.open(run.directory).recipe == changed


def test_a_run_that_another_process_is_about_to_start_keeps_its_recipe(run: Run) -> None:
    with _holder(run) as child, pytest.raises(RunError, match=rf"in use by process {child.pid}"):
        Run.create(run.directory, RECIPE.with_({"optim.lr": 0.5}))
    assert Run.open(run.directory).recipe == RECIPE


def test_another_recipe_is_refused_and_the_differences_are_named(run: Run) -> None:
    _start(run)
    changed = RECIPE.with_({"optim.lr": 0.5, "seed": 3, "every.keep": 9})
    with pytest.raises(RunError) as caught:
        Run.create(run.directory, changed)
    assert "another recipe (optim.lr: 0.1 -> 0.5; seed: 0 -> 3): choose another --run folder" in str(caught.value)
    assert Run.open(run.directory).recipe == RECIPE


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"exists and is not a run \(no recipe\.json\)"):
        Run.create(tmp_path, RECIPE)
    with pytest.raises(RunError, match=r"exists and is not a run"):
        Run.create(tmp_path / "notes.txt", RECIPE)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def _create_and_die(folder: Path, left: int) -> None:
    """Make a run, and be killed before the operation after ``left`` of them."""
    counted = itertools.count()

    def killing(act: Callable[..., object]) -> Callable[..., object]:
        def do(*arguments: object, **values: object) -> object:
            if next(counted) == left:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*arguments, **values)

        return do

    for name in ("mkdir", "fsync", "replace", "unlink"):
        setattr(os, name, killing(getattr(os, name)))
    Run.create(folder, RECIPE)


def test_a_run_killed_before_any_of_its_first_operations_is_taken_up_by_the_same_command(tmp_path: Path) -> None:
    for operation in range(30):
        folder = tmp_path / str(operation)
        child = start(_create_and_die, folder, operation)
        child.join()
        assert Run.create(folder, RECIPE).checkpoints.is_dir()
        assert Run.open(folder).recipe == RECIPE
        if not child.exitcode:
            break
    else:
        pytest.fail("the run was never made")
    assert operation >= 5


def test_a_recipe_that_a_power_cut_left_empty_is_written_again(run: Run) -> None:
    (run.directory / "recipe.json").write_bytes(b"")
    assert Run.create(run.directory, RECIPE).recipe == RECIPE
    assert Run.open(run.directory).recipe == RECIPE
    with run.log() as log:
        log.append(Noticed(message="trained"))
    (run.directory / "recipe.json").write_bytes(b"")
    with pytest.raises(RunError, match=r"recipe\.json cannot be used"):
        Run.create(run.directory, RECIPE)


def test_checkpoints_without_a_recipe_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    with pytest.raises(RunError, match=r"exists and is not a run"):
        Run.create(tmp_path, RECIPE)


def test_links_in_a_run_from_elsewhere_lead_to_no_file_of_the_user(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "authorized_keys"
    mine.write_bytes(b"ssh-rsa mine\nno newline at the end")

    def refused(name: str, act: Callable[[], object]) -> None:
        link = run.directory / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(mine)
        with pytest.raises(RunError, match=rf"{re.escape(name)} is a link to .*authorized_keys: .*remove the link"):
            act()
        link.unlink()
        assert mine.read_bytes() == b"ssh-rsa mine\nno newline at the end"

    refused("lock", lambda: run.lock().__enter__())
    refused("checkpoints/step-00000010", lambda: run.lock().__enter__())
    refused("checkpoints/.part", lambda: run.lock().__enter__())
    refused("checkpoints/step-00000020/state.json", lambda: run.lock().__enter__())
    refused("events.jsonl", run.log)
    refused("events.jsonl", run.log_beside)
    refused("events-3.jsonl", lambda: run.log(3, 1))
    (run.directory / "events-2.jsonl").hardlink_to(mine)
    with pytest.raises(RunError, match=r"events-2\.jsonl is a hard link: the file has 1 more name,.*cp -a RUN COPY"):
        run.log(2, 1)
    assert mine.read_bytes() == b"ssh-rsa mine\nno newline at the end"
    missing = run.directory / "events.jsonl"
    missing.symlink_to(tmp_path / "new")
    with pytest.raises(RunError, match="is a link"):
        run.log()
    assert not (tmp_path / "new").exists()


def test_a_run_of_which_a_backup_of_hard_links_was_made_goes_on_and_leaves_the_backup_as_it_was(
    run: Run, tmp_path: Path
) -> None:
    with run.lock(), run.log() as log:
        log.append(Noticed(message="before"))
    backup = tmp_path / "backup"
    backup.mkdir()
    for name in ("lock", "events.jsonl"):
        (backup / name).hardlink_to(run.directory / name)
    was = {path.name: path.read_bytes() for path in backup.iterdir()}
    (run.directory / "lock").write_text("1")  # of a process that is gone
    was["lock"] = b"1"
    held = rf"is in use by process {os.getpid()}\b"
    with run.lock(), run.log() as log, pytest.raises(RunError, match=held), run.lock():
        log.append(Noticed(message="after"))
    with run.lock(), run.log() as log:
        log.append(Noticed(message="after"))
    assert [event.message for event in run.events() if isinstance(event, Noticed)] == ["before", "after"]
    assert {path.name: path.read_bytes() for path in backup.iterdir()} == was


def test_a_recipe_that_is_a_link_is_replaced_and_not_written_through(run: Run, tmp_path: Path) -> None:
    others = Run.create(tmp_path / "mine", RECIPE.with_({"parallel.threads": 2}))
    before = (others.directory / "recipe.json").read_bytes()
    (run.directory / "recipe.json").unlink()
    (run.directory / "recipe.json").symlink_to(others.directory / "recipe.json")
    Run.create(run.directory, RECIPE.with_({"parallel.threads": 7}))
    assert (others.directory / "recipe.json").read_bytes() == before
    assert Run.open(run.directory).recipe.parallel.threads == 7


def test_a_run_folder_may_itself_be_a_link(run: Run, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.directory)
    linked = Run.create(tmp_path / "link", RECIPE)
    with linked.lock(), linked.log() as log:
        log.append(Noticed(message="here"))
    assert [event.kind for event in run.events()] == ["Noticed"]


def test_an_empty_folder_becomes_a_run(tmp_path: Path) -> None:
    assert Run.create(tmp_path, RECIPE).recipe == RECIPE


@pytest.mark.parametrize("place", ["nowhere", "file", "folder"])
def test_what_is_no_run_does_not_open(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    why = "does not exist" if place == "nowhere" else r"is not a run: it has no recipe\.json"
    with pytest.raises(RunError, match=f"{place} {why}"):
        Run.open(tmp_path / place)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"data": {"train": 3}}', b'{"colour": 1}'])
def test_a_damaged_recipe_is_named_with_its_path(run: Run, content: bytes) -> None:
    (run.directory / "recipe.json").write_bytes(content)
    with pytest.raises(RunError, match=r"a/recipe\.json cannot be used: "):
        Run.open(run.directory)


def test_each_start_is_a_new_attempt_and_the_end_is_found(run: Run) -> None:
    with run.log() as log:
        log.append(Noticed(message="first"))
        log.append(Ended(status="interrupted", step=1, seconds=1.0, images=8))
    assert run.finished() is None
    with run.log() as log:
        end = log.append(Ended(status="finished", step=2, seconds=1.0, images=8))
    assert [event.attempt for event in run.events()] == [1, 1, 2]
    assert run.finished() == end


def test_ranks_write_files_of_their_own(run: Run) -> None:
    with run.log() as first, run.log(rank=1) as second:
        first.append(Noticed(message="zero"))
        second.append(Noticed(message="one"))
    assert [event.rank for event in run.events()] == [0]
    assert [event.rank for event in run.events(rank=1)] == [1]
    assert (run.directory / "events-1.jsonl").exists()


def test_copying_the_folder_copies_the_run(run: Run, tmp_path: Path) -> None:
    with run.lock(), run.log() as log:
        log.append(Noticed(message="under way"))
        copy = Run.open(shutil.copytree(run.directory, tmp_path / "b"))
        with copy.lock(), copy.log() as other:
            other.append(Noticed(message="on its own"))
    assert copy.recipe == run.recipe
    assert [event.attempt for event in copy.events()] == [1, 2]
    assert [event.attempt for event in run.events()] == [1]


def test_a_run_in_use_is_refused_with_the_process_named(run: Run) -> None:
    with _holder(run) as child:
        says = f"a is in use by process {child.pid}: wait for it, stop it, or choose another --run folder"
        with pytest.raises(RunError, match=says), run.lock():
            pytest.fail("two processes hold one run")
        assert Run.open(run.directory) == run


def test_the_lock_is_free_again_when_its_holder_is_killed(run: Run) -> None:
    with _holder(run) as child:
        child.kill()
        child.wait()
        with run.lock():
            assert (run.directory / "lock").read_text() == str(os.getpid())


def test_a_run_that_goes_on_removes_what_writers_left_that_were_killed(run: Run) -> None:
    names = (".recipe.json.abcd_123.part", ".best.safetensors.abcdefgh.part", ".model.safetensors.00000000.part")
    left = [run.directory / name for name in names]
    spared = [run.directory / name for name in ("notes.part", ".mine.part", ".model.safetensors.0000.part")]
    for folder in (*left, *spared):
        folder.mkdir()
    with run.lock():
        assert not any(folder.exists() for folder in left)
    assert all(folder.exists() for folder in spared)


def test_a_run_that_is_moved_while_it_is_held_stays_held(run: Run, tmp_path: Path) -> None:
    with _holder(run) as child:
        moved = Run.open(run.directory.rename(tmp_path / "moved"))
        assert moved.is_held()
        with pytest.raises(RunError, match=f"moved is in use by process {child.pid}"), moved.lock():
            pytest.fail("two processes hold one run")


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_run_on_a_file_system_without_locks_is_trained_and_that_is_noted(
    error: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: object, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    with run.lock() as is_sure:
        assert is_sure
    monkeypatch.setattr(fcntl, "flock", fail)
    with run.lock() as is_sure:
        assert not is_sure
    with _locked(run, None):
        pass
    [noticed] = [event for event in run.events() if isinstance(event, Noticed)]
    assert "has no locks: nothing keeps a second process from training this run" in noticed.message


def test_a_holder_on_another_machine_is_told_apart(run: Run) -> None:
    values = {"digest": "0", "step": 0, "steps": 1, "steps_per_epoch": 1.0, "batch_size": 1}
    for host, message in ((platform.node(), "process {}: wait"), ("far.away", "process {} on far.away: wait")):
        with run.log() as log:
            log.append(Started(**values, machine={"host": host}))  # type: ignore[arg-type]
        with (
            _holder(run) as child,
            pytest.raises(RunError, match=f"in use by {message.format(child.pid)} for it"),
            run.lock(),
        ):
            pass


def test_a_full_disk_is_said_where_the_lock_cannot_be_written(small_disk: Path) -> None:
    run = Run.create(small_disk / "a", RECIPE)
    (small_disk / "filler").write_bytes(b"x")
    with contextlib.suppress(OSError), (small_disk / "filler").open("ab", buffering=0) as filler:
        while filler.write(b"x" * 4096):
            pass
    with pytest.raises(StorageError, match="the disk is full"), run.lock():
        pass


def test_the_lock_is_free_again_after_an_error(run: Run) -> None:
    with pytest.raises(ZeroDivisionError), run.lock():
        raise ZeroDivisionError
    with run.lock():
        pass


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of an ordinary user, who this process is for the moment (root may write anywhere)."""
    folder = Path(tempfile.mkdtemp())
    user = os.geteuid()
    if user == 0:
        os.chown(folder, 65534, -1)
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    shutil.rmtree(folder)


def test_a_read_only_folder_is_told_in_one_line(unprivileged: Path) -> None:
    run = Run.create(unprivileged / "a", RECIPE)
    run.directory.chmod(0o555)
    changed = RECIPE.with_({"every.keep": 5})
    for attempt in (lambda: Run.create(run.directory, changed), lambda: run.lock().__enter__(), run.log):
        with pytest.raises(StorageError, match=r"is not writable \(Permission denied\): choose another folder"):
            attempt()
    assert Run.open(run.directory) == run
    run.directory.chmod(0o755)


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path, before = tmp_path / "tuned.toml", resource.getrlimit(resource.RLIMIT_FSIZE)
    replace_file(path, "the old one")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageError, match="cannot write"):
            replace_file(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "the old one" and [file.name for file in tmp_path.iterdir()] == ["tuned.toml"]


def test_a_folder_that_may_not_be_looked_into_is_told_in_one_line(unprivileged: Path) -> None:
    closed = unprivileged / "closed"
    closed.mkdir()
    closed.chmod(0)
    with pytest.raises(StorageError, match=r"is not writable \(Permission denied\): choose another folder"):
        Run.create(closed / "a", RECIPE)
    with pytest.raises(RunError, match=r"cannot read .*recipe\.json: Permission denied"):
        Run.open(closed / "a")
    closed.chmod(0o755)

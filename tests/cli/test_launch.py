"""``steady launch`` as users type it: plans are shown as they will be run, and mistakes are told before it starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from steadytrain.cli import main
from steadytrain.doctor.facts import FolderFacts


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a hosts file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("# two machines\ngpu1 slots=2\ngpu2\n")
    return tmp_path


def test_a_dry_run_shows_the_files_and_commands_and_writes_nothing(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "--on", "slurm", "--nodes", "2", "--procs", "8", "--set", "slurm.partition=gpu", "--dry-run"]
    assert main([*words, "--", "train", "a.rec", "--run", "runs/a"]) == 0
    shown = capsys.readouterr().out
    assert "# slurm: 16 ranks" in shown and "#SBATCH --partition=gpu" in shown
    assert "train a.rec --run runs/a &" in shown
    assert "sbatch --parsable launch/steadytrain/steadytrain.sbatch" in shown
    assert [path.name for path in work.iterdir()] == ["hosts"]


def test_a_dry_run_writes_the_files_where_it_is_told_to(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--on", "kubernetes", "--set", "image=me/x:1", "--set", "name=cats", "-o", "out", "--dry-run"]
    assert main([*words, "--", "bandwidth"]) == 0
    output = capsys.readouterr()
    written = (work / "out" / "cats.yaml").read_text()
    assert written.strip() in output.out and output.err == "written: out/cats.yaml\n"


def test_a_run_is_resumed_by_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--on", "local", "--procs", "2", "--dry-run", "--", "resume", "runs/a"]) == 0
    assert "-m steadytrain resume --procs 2 runs/a" in capsys.readouterr().out


def test_the_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--hosts", "hosts", "--sync", "cats", "--dry-run", "--json", "--", "train", "a.rec"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["on"], document["ranks"]) == ("ssh", 3)
    assert [(stage["what"], len(stage["commands"])) for stage in document["stages"]] == [
        ("check", 2),
        ("copy", 2),
        ("run", 2),
    ]


def test_a_job_file_and_what_goes_over_it(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "job.toml").write_text(
        'on = "slurm"\nnodes = 4\nwords = ["train", "a.rec"]\n[slurm]\npartition = "gpu"\naccount = "me"\n'
    )
    assert main(["launch", "--job", "job.toml", "--nodes", "2", "--set", "slurm.partition=cpu", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(f"#SBATCH --{word}\n" in shown for word in ("nodes=2", "partition=cpu", "account=me"))


def test_the_old_trackers_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "launch -n 4 -s 2 -H hosts --launcher ssh --env OMP_NUM_THREADS:3 --dry-run --json train a.rec --lr 0.1"
    assert main(words.split()) == 0
    output = capsys.readouterr()
    run = json.loads(output.out)["stages"][-1]["commands"]
    assert [command["argv"][-1].split(" -- ")[1] for command in run] == ["-P -m steadytrain train a.rec --lr 0.1"] * 2
    assert [command["variables"] for command in run] == [{"OMP_NUM_THREADS": "3"}] * 2
    assert "--size 4 --procs 2 --first 2" in run[1]["argv"][-1]
    assert "-s 2 is ignored: ranks exchange gradients directly, and --engine async has one server" in output.err


@pytest.mark.parametrize(
    "on", [["--hosts", "hosts"], ["--on", "mpi", "--procs", "2"], ["--on", "slurm", "--nodes", "2"]]
)
def test_asynchronous_ranks_get_a_password_that_no_plan_shows(
    on: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "never shown")
    asynchronous = ["train", "a.rec", "--engine", "async"]
    assert main(["launch", *on, "--dry-run", "--", *asynchronous]) == 0
    shown = capsys.readouterr().out
    assert "RAY_AUTH_TOKEN=..." in shown and "never shown" not in shown
    assert main(["launch", *on, "--dry-run", "--", "train", "a.rec"]) == 0
    assert "RAY_AUTH" not in capsys.readouterr().out, "other engines need none"


def test_where_pods_cannot_get_a_password_unseen_a_secret_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--on", "kubernetes", "--nodes", "2", "--set", "image=me/x:1", "--dry-run"]
    asynchronous = ["--", "train", "s3://b/a.rec", "--run", "s3://b/runs/a", "--engine", "async"]
    assert main([*words, *asynchronous]) == 2
    assert "--set kubernetes.secret=NAME" in capsys.readouterr().err
    assert main([*words, "--set", "kubernetes.secret=ray", *asynchronous]) == 0
    assert "key: RAY_AUTH_TOKEN" in capsys.readouterr().out


POD = ("--on", "k8s", "--set", "image=me/x:1", "--dry-run")
CLAIM = ("--set", "kubernetes.claim=photos")
MACHINES = ("--on", "skypilot", "--set", "image=me/x:1", "--dry-run")
BUCKET = ("--set", "sky.mounts./data=s3://photos")
MOUNT, COPY = ("--set", "kubernetes.mount=/mnt"), ("--set", "sky.workdir=.")


@pytest.mark.parametrize(
    ("place", "command", "wrong", "remedy"),
    [
        ([*POD, *CLAIM], "train cats --run runs/a", "cats and runs/a are", "/data/cats and --run /data/runs/a"),
        ([*POD, *CLAIM], "train /data/cats", "runs is", "--run /data/runs/a"),
        ([*POD, *CLAIM], "train /data/../cats --run /data/a", "/data/../cats is", "/data/cats"),
        ([*POD, *CLAIM], "finetune /data/c --val /v --run /data/a", "/v is", "/data/v"),
        ([*POD, *CLAIM], "finetune /data/c --weights w.pth --run /data/a", "w.pth is", "/data/w.pth"),
        ([*POD, *CLAIM], "resume runs/a", "runs/a is", "/data/a"),
        ([*POD, *CLAIM], "pack cats /data/cats.rec", "cats is", "/data/cats"),
        (POD, "train /data/cats --run /data/a", "/data/cats and /data/a are", "kubernetes.claim=NAME"),
        ([*POD, *CLAIM, *MOUNT], "train /mnt/c --run /data/a", "/data/a is", "--run /mnt/runs/a"),
        (MACHINES, "train cats --run runs/a", "cats and runs/a are", "sky.mounts./data=s3://NAME"),
        ([*MACHINES, *BUCKET], "train cats --run /data/a", "cats is", "/data/cats"),
        ([*MACHINES, *BUCKET, *COPY], "train c --run r", "r is", "--run /data/runs/r"),
        ([*MACHINES, *BUCKET, *COPY], "train ../c --run /data/r", "../c is", "/data/c"),
    ],
)
def test_data_and_runs_that_machines_do_not_share_are_refused_in_one_line(
    place: list[str], command: str, wrong: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *place, "--", *command.split()]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"steady: {wrong}") and remedy in output.err and output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(
    "words",
    [
        [*POD, *CLAIM, "--", "train", "/data/cats", "--run", "/data/a"],
        [*POD, "--", "train", "s3://photos/cats", "--run", "s3://photos/runs/a"],
        [*POD, *CLAIM, "--set", "folder=/data/me", "--", "train", "cats"],
        [*POD, *CLAIM, "--set", 'mounted=["/opt"]', "--", "train", "/opt/cats", "--run", "/data/a"],
        [*MACHINES, *BUCKET, *COPY, "--", "train", "cats", "--run", "/data/a"],
        [*POD, "--", "python", "mine.py", "cats"],
    ],
)
def test_data_and_runs_on_what_machines_share_are_launched(words: list[str]) -> None:
    assert main(["launch", *words]) == 0


def test_data_of_a_recipe_file_must_be_shared_as_well(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "cats.toml").write_text('[data]\ntrain = "photos"\n')
    assert main(["launch", *POD, *CLAIM, "--", "train", "--recipe", "cats.toml", "--run", "/data/a"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("steady: cats.toml and photos are not below /data")
    assert "kubernetes.mount=/FOLDER), or name /data/" in message


def test_a_python_on_a_disk_of_this_machine_is_named(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["launch", "--on", "slurm", "--dry-run", "--", "train", "/shared/cats", "--run", "/shared/a"]
    here = FolderFacts(path=str(work), kind="ext4", network=False)
    monkeypatch.setattr("steadytrain.cli.launch.places", lambda root, environment, *paths: dict.fromkeys(paths, here))
    monkeypatch.setattr("sys.base_prefix", "/usr")  # as in an environment of one's own
    assert main(words) == 0
    warning = f"warning: this Python, {sys.executable}, is on ext4, a disk of this machine"
    assert capsys.readouterr().err.count(warning) == 1
    assert main([*words[:3], "--set", "python=/shared/env/bin/python", *words[3:]]) == 0
    assert "this Python" not in capsys.readouterr().err


def test_slurm_is_asked_for_cores_and_what_is_not_asked_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--on", "slurm", "--procs", "4", "--dry-run"]
    assert main([*words, "--set", "gpus=4", "--", "train", "a.rec"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --cpus-per-task=4\n" in shown and "srun --kill-on-bad-exit=1 --cpus-per-task=4 " in shown
    assert "# note: each rank asks for 4 cores" in shown and "gpus is not set" not in shown
    assert main([*words, "--", "train", "a.rec"]) == 0
    shown = capsys.readouterr().out
    assert "cpus-per-task" not in shown and "--set cpus=N asks for N" in shown and "gpus is not set" in shown
    assert main([*words, "--set", 'slurm.options=["--gres=gpu:4", "--cpus-per-gpu=8"]', "--", "train", "a.rec"]) == 0
    shown = capsys.readouterr().out
    assert "cpus is not set" not in shown and "gpus is not set" not in shown


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ((*POD, *CLAIM, "--set", "gpus=2", "--procs", "2", "--", "train", "/data/c", "--run", "/data/a"), "cpu: '14'"),
        ((*POD, *CLAIM, "--set", "gpus=4", "--", "train", "/data/c", "--run", "/data/a"), "1 of the 4 GPUs"),
    ],
)
def test_ranks_of_other_schedulers_are_not_starved(
    words: tuple[str, ...], asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words]) == 0
    assert asked in capsys.readouterr().out


def test_a_patch_is_a_file_or_a_value(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "pod.yaml").write_text("spec:\n  hostIPC: true\n  volumes:\n  - name: x\n    secret: {defaultMode: 0400}\n")
    (work / "two.yaml").write_text(
        "kind: Job\nspec: {backoffLimit: 9}\n---\nkind: Service\nmetadata: {labels: {a: b}}\n"
    )
    command = ["--", "train", "s3://photos/cats", "--run", "s3://photos/runs/a"]
    for value, lines in (
        ("pod.yaml", ("hostIPC: true", "defaultMode: 256")),  # octal, as kubectl reads it
        ("two.yaml", ("backoffLimit: 9", "    a: b")),
        ('{"spec": {"hostIPC": true}}', ("hostIPC: true",)),
    ):
        assert main(["launch", *POD, "--set", f"kubernetes.patch={value}", *command]) == 0
        shown = capsys.readouterr().out
        assert all(f"{line}\n" in shown for line in lines)
    assert main(["launch", *POD, "--set", "kubernetes.patch.spec.hostIPC=true", *command]) == 0
    assert "hostIPC: true\n" in capsys.readouterr().out
    assert main(["launch", *POD, "--set", "kubernetes.resources.vpc.amazonaws.com/efa=4", *command]) == 0
    assert "vpc.amazonaws.com/efa: '4'\n" in capsys.readouterr().out
    assert main(["launch", *POD, "--set", "kubernetes.patch=gone.yaml", *command]) == 2
    assert capsys.readouterr().err.startswith("steady: cannot read the patch gone.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the patch pod.yaml holds nothing; it must hold tables"),
        ("hello\n", "the patch pod.yaml holds ['hello']; it must hold tables"),
        ("spec: &a\n  b: *a\n", "cannot read the patch pod.yaml: Circular reference detected"),
        ("2030-01-01: a\n", "cannot read the patch pod.yaml: keys must be str"),
        ("spec: [a]\n", "kubernetes.patch.spec is ['a']; it must be a table"),
    ],
)
def test_a_file_that_is_no_patch_is_a_users_mistake(
    work: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    (work / "pod.yaml").write_text(text)
    command = ["--", "train", "s3://photos/cats", "--run", "s3://photos/runs/a"]
    assert main(["launch", *POD, "--set", "kubernetes.patch=pod.yaml", *command]) == 2
    assert capsys.readouterr().err.startswith(f"steady: {expected}")
    assert main(["launch", *POD, "--set", "kubernetes.patch=[3]", *command]) == 2
    assert "it must be a table or a list of tables" in capsys.readouterr().err


def test_in_a_container_slurm_starts_the_images_python(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--on", "slurm", "--set", "image=me/x:1", "--set", 'slurm.mounts=["/data"]', "--dry-run", "--"]
    assert main([*words, "train", "/data/a.rec", "--run", "/data/runs/a"]) == 0
    assert " python3 -P -m steadytrain train /data/a.rec" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "kubernets", "--", "train", "a.rec"], "unknown launcher 'kubernets'"),
        (["--on", "kubernets", "--", "train", "a.rec"], "Did you mean kubernetes?"),
        (["--", "trian", "a.rec"], "Did you mean train?"),
        (["--nodes", "two", "--", "train", "a.rec"], "--nodes 2:4"),
        (["--nodes", "²", "--", "train", "a.rec"], "--nodes 2:4"),
        (["--nodes", "4:2", "--hosts", "hosts", "--", "train", "a.rec"], "put the smaller number first"),
        (["--hosts", "gone", "--", "train", "a.rec"], "cannot read --hosts gone (No such file or directory)"),
        (["--set", "slurm.partitoin=gpu", "--", "train", "a.rec"], "Did you mean partition or options?"),
        (["--set", "slurm.partition", "--", "train", "a.rec"], "KEY=VALUE, such as --set slurm.partition=gpu"),
        (["--set", "name=a", "--set", "name.x=1", "--", "train", "a.rec"], "name is 'a'"),
        (["--env", "MY_TOKEN=1", "--", "train", "a.rec"], "passes it on unseen"),
        (["--json", "--", "train", "a.rec"], "standard output belongs to rank 0"),
        (["--job", "job.txt", "--", "train", "a.rec"], "a job file is .toml, .json or .yaml"),
        (["--launcher", "sge", "--", "train", "a.rec"], "sge is not supported"),
        ([], "no command to start: put it after two dashes"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 2
    errors = capsys.readouterr().err
    assert message in errors and len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("train x --rnu y", "Unknown option: --rnu. Did you mean --run?"),
        ("train x --set optim.wd=1", "Did you mean optim.weight_decay?"),
        ("train x --lr -1", "optim.lr is -1.0"),
        ("bandwidth --sceonds 2", "Did you mean --seconds?"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_command_that_every_rank_would_refuse_is_refused_at_once(
    work: Path, capsys: pytest.CaptureFixture[str], words: str, part: str, dry: list[str]
) -> None:
    assert main(["launch", "--on", "slurm", "-o", "out", *dry, "--", *words.split()]) == 2
    output = capsys.readouterr()
    assert part in output.err and not output.out
    assert [path.name for path in work.iterdir()] == ["hosts"]


def test_of_a_job_that_was_refused_no_output_is_promised(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "bin").mkdir()
    (work / "bin" / "sbatch").write_text("#!/bin/sh\necho invalid partition >&2\nexit 1\n")
    (work / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{work / 'bin'}:/usr/bin:/bin")
    python = ["--set", "python=/shared/python"]
    assert main(["launch", "--on", "slurm", *python, "--", "train", "x", "--run", "/shared/a"]) == 1
    errors = capsys.readouterr().err
    assert "invalid partition" in errors and "its output" not in errors and "warning" not in errors
    (work / "bin" / "sbatch").write_text("#!/bin/sh\necho 42\n")
    assert main(["launch", "--on", "slurm", "--", "train", "x"]) == 0
    errors = capsys.readouterr().err
    assert "its output: steadytrain-42.log" in errors and "scancel 42" in errors

"""What each launcher makes of a job, against texts written by hand; hostile words stay single words everywhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.errors import InputError
from steadytrain.launch import LAUNCHERS, Job, render
from steadytrain.launch.kubernetes import Kubernetes
from steadytrain.launch.mpi import Mpi
from steadytrain.launch.plan import plan_text
from steadytrain.launch.sky import Sky
from steadytrain.launch.slurm import Slurm
from steadytrain.launch.ssh import Ssh

GOLDEN = Path(__file__).parents[1] / "golden" / "launch"
HOSTS = ("10.0.0.1", "10.0.0.2")
TRAIN = ("train", "a.rec")
SPACED = ("train", "a b.rec")

SLURM = Job(
    words=("train", "a b.rec", "--run", "runs/$(x)"),
    nodes=4,
    procs=2,
    name="cats",
    python="/opt/env/bin/python",
    folder="/srv/my cats",
    env={"GREETING": "it's $HOME", "HF_TOKEN": None},
    restarts=3,
    minutes=240,
    cpus=16,
    memory_gb=64,
    gpus=2,
    options=(Slurm(partition="gpu", options=("--exclusive",)),),
)
ARRAY = replace(SLURM, words=("resume", "runs/a"), tasks=(("resume", "runs/a"), ("resume", "runs/b c")), at_once=2)
POD = Job(
    words=("train", "/data/a b.rec", "--run", "/data/$(x)"),
    nodes=4,
    procs=2,
    name="cats",
    env={"OMP_NUM_THREADS": "4", "HF_TOKEN": None},
    restarts=3,
    grace_seconds=90,
    minutes=240,
    cpus=16,
    memory_gb=64,
    gpus=2,
    image="registry.example/steadytrain:1",
    options=(Kubernetes(namespace="vision", claim="photos", secret="keys", selector={"accelerator": "h100"}),),
)
SET = Job(
    words=("train", "/data/a.rec"),
    nodes=2,
    name="cats",
    restarts=3,
    image="steadytrain:1",
    options=(Kubernetes(kind="jobset"),),
)
SKY = replace(
    SLURM,
    python="python3",
    port=29500,
    minutes=None,
    image="registry.example/steadytrain:1",
    options=(
        Slurm(),
        Sky(infra="aws/us-east-1", accelerators="H100:2", spot=True, workdir=".", mounts={"/data": "s3://photos/2026"}),
    ),
)


ENV = {"OMP_NUM_THREADS": "4", "HF_TOKEN": None}
SSH = Job(
    words=SPACED,
    hosts=("me@gpu1:2222 slots=2", "gpu2"),
    python="/opt/my env/bin/python",
    folder="/srv/my cats",
    port=29500,
    env=ENV,
    restarts=2,
    options=(Ssh(sync="~/cats/", options=("-F", "my conf")),),
)
ELASTIC = Job(words=TRAIN, hosts=HOSTS, procs=2, least=1, nodes=2, name="cats", folder="/work", port=29500, restarts=3)
MPI = Job(
    words=SPACED,
    hosts=("gpu1:2222 slots=4", "gpu2:2222"),
    folder="/work",
    port=29500,
    env=ENV,
    options=(Ssh(options=("-F", "my conf")), Mpi(options=("--mca", "btl", "self,tcp"))),
)
MPICH = Job(words=TRAIN, procs=2, port=29500, options=(Mpi(kind="mpich"),))
LOCAL = Job(words=("train", "a b.rec", "--run", "runs/a"), procs=2, env={"OMP_NUM_THREADS": "1"})

FILES = [("slurm", SLURM, "slurm.sbatch"), ("slurm", ARRAY, "array.sbatch")]
FILES += [
    ("kubernetes", POD, "job.yaml"),
    ("kubernetes", SET, "jobset.yaml"),
]
FILES += [("sky", SKY, "sky.yaml")]
COMMANDS = [("local", LOCAL, "local.txt"), ("ssh", SSH, "ssh.txt"), ("ssh", ELASTIC, "elastic.txt")]
COMMANDS += [("mpi", MPI, "mpi.txt"), ("mpi", MPICH, "mpich.txt")]
JOBS = [(on, job) for on, job, _ in FILES + COMMANDS]


@pytest.mark.parametrize(("on", "job", "name"), FILES)
def test_the_file_of_a_job(on: str, job: Job, name: str) -> None:
    (file,) = render(on, job).files
    assert file.text == (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("on", "job", "name"), COMMANDS)
def test_the_commands_of_a_job(on: str, job: Job, name: str) -> None:
    assert plan_text(on, job, render(on, job), Path("launch")) + "\n" == (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("on", "job", "argv"),
    [
        ("slurm", SLURM, ["sbatch", "--parsable", "@cats.sbatch"]),
        ("kubernetes", POD, ["kubectl", "create", "-n", "vision", "-f", "@cats.yaml"]),
        ("sky", SKY, ["sky", "jobs", "launch", "--yes", "--detach-run", "--secret", "HF_TOKEN", "@cats.sky.yaml"]),
    ],
)
def test_how_a_job_is_handed_over(on: str, job: Job, argv: list[str]) -> None:
    ((submit,),) = (stage.commands for stage in render(on, job).stages)
    assert list(submit.argv) == argv


@pytest.mark.parametrize(("on", "job"), JOBS)
def test_a_plan_is_plain_data_and_the_same_every_time(on: str, job: Job) -> None:
    document = render(on, job).to_dict()
    assert json.loads(json.dumps(document)) == document == render(on, job).to_dict()


@pytest.mark.parametrize(("on", "job"), JOBS)
def test_ranks_import_nothing_of_the_folder_that_they_start_in(on: str, job: Job) -> None:
    text = json.dumps(render(on, job).to_dict()) + "".join(file.text for file in render(on, job).files)
    words = re.sub(r"[\\\"',\[\]\s]+", " ", text)
    assert not re.search(r"(?<!-P) -m (steadytrain|torch)", words)
    assert ("-m -- steadytrain" in words) == ("PYTHONSAFEPATH" in words)


def test_a_users_own_program_imports_what_lies_beside_it() -> None:
    plan = render("ssh", replace(ELASTIC, words=("python", "train.py")))
    assert "PYTHONSAFEPATH" not in json.dumps(plan.to_dict())


def test_every_launcher_is_held_by_a_text() -> None:
    assert {on for on, _ in JOBS} == LAUNCHERS.keys()


@pytest.mark.parametrize(("on", "job"), [job for job in JOBS if job[0] in ("slurm", "ssh", "mpi", "sky")])
def test_the_value_of_a_variable_without_one_stands_nowhere(on: str, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_never_shown")
    assert "hf_never_shown" not in json.dumps(render(on, job).to_dict())


@pytest.mark.parametrize("job", [SLURM, ARRAY])
def test_the_script_is_right_bash(job: Job) -> None:
    subprocess.run(["bash", "-n"], input=render("slurm", job).files[0].text, text=True, check=True)


@pytest.mark.parametrize("on", sorted(set(LAUNCHERS) - {"slurm"}))
def test_an_array_is_slurms(on: str) -> None:
    with pytest.raises(InputError, match=f"--on {on} takes no array of jobs"):
        render(on, replace(ARRAY, hosts=HOSTS))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    script = render("slurm", SLURM).files[0].text  # SC2016: what is quoted is not to be expanded
    process = subprocess.run(
        ["shellcheck", "--exclude=SC2016", "-"], input=script, text=True, capture_output=True, check=False
    )
    assert process.returncode == 0, process.stdout


words = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4)


@given(words)
def test_hostile_words_stay_single_words(rest: list[str]) -> None:
    job = Job(words=("python", "x.py", *rest), hosts=HOSTS, folder="/a b; c", python="/a 'b'/python")
    *_, run = render("ssh", job).stages
    for command in run.commands:
        shell_words = shlex.split(command.argv[-1])  # as the shell there reads it
        assert shell_words[: 1 + 1] == ["cd", "/a b; c"] and shell_words[2:5] == ["&&", "exec", "/a 'b'/python"]
        assert shell_words[shell_words.index("--") + 1 :] == ["x.py", *rest]
    script = render("slurm", Job(words=("python", "x.py", *rest))).files[0].text
    begin, end = script.index("srun ") + 5, script.index(" &\nranks=")
    shell_words = shlex.split(script[begin:end])
    assert shell_words[shell_words.index("--") + 1 :] == ["x.py", *rest]


@given(words)
def test_every_scheduler_hands_over_the_same_words(rest: list[str]) -> None:
    job = Job(words=("python", "x.py", *rest), nodes=2, procs=2, image="a")
    container = _containers(render("kubernetes", job).files[0].text)[0]
    changes = [word.replace("$$(", "$(") for word in container["args"]]
    assert changes[changes.index("--") + 1 :] == ["x.py", *(word.replace("$$(", "$(") for word in rest)]
    line = yaml.safe_load(render("sky", job).files[0].text)["run"].partition("\n")[2]
    assert shlex.split(line)[shlex.split(line).index("--") + 1 :] == ["x.py", *rest]


def _containers(manifests: str) -> list[dict[str, Any]]:
    (job,) = [manifest for manifest in yaml.safe_load_all(manifests) if manifest["kind"] == "Job"]
    return list(job["spec"]["template"]["spec"]["containers"])


@pytest.mark.parametrize(
    ("on", "job", "message"),
    [
        ("pbs", Job(words=TRAIN), "unknown launcher 'pbs'"),
        ("local", Job(words=TRAIN, nodes=2), "--hosts FILE"),
        ("ssh", Job(words=TRAIN), "--hosts FILE"),
        ("ssh", Job(words=TRAIN, hosts=HOSTS, nodes=3), "2 hosts are listed"),
        ("mpi", Job(words=TRAIN, nodes=2), "--hosts FILE"),
        ("mpi", Job(words=TRAIN, hosts=("a:22", "b")), "~/.ssh/config"),
        ("slurm", Job(words=TRAIN, least=1, nodes=2), "a single number for --nodes"),
        ("slurm", Job(words=TRAIN, nodes=2, ranks=3), "change --nodes"),
        ("kubernetes", Job(words=TRAIN), "--set image="),
        ("kubernetes", Job(words=TRAIN, image="a", env={"A": None}), "kubernetes.secret=NAME"),
        ("sky", Job(words=TRAIN), "--set 'sky.setup=pip install steadytrain'"),
        ("sky", Job(words=TRAIN, image="a", gpus=8), "--set sky.accelerators=H100:8"),
        ("sky", Job(words=TRAIN, image="a", least=1, nodes=2), "a single number for --nodes"),
    ],
)
def test_what_a_place_cannot_do_is_refused_with_a_remedy(on: str, job: Job, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        render(on, job)


def test_what_makes_no_difference_there_is_told() -> None:
    plan = render("local", Job(words=TRAIN, image="a", options=(Slurm(qos="high"),)))
    assert plan.notes == ("image, slurm: not used by local",)


def test_ranks_that_pack_may_be_lost() -> None:
    pack = Job(words=("pack", "photos", "x"), nodes=2, procs=4, restarts=1)
    assert "srun --kill-on-bad-exit=0 " in render("slurm", pack).files[0].text
    assert "srun --kill-on-bad-exit=1 " in render("slurm", replace(pack, words=TRAIN)).files[0].text
    run = render("ssh", replace(pack, hosts=HOSTS)).stages[-1]
    assert run.may_fail == 1
    assert " --independent -- -P -m steadytrain pack photos x" in run.commands[0].argv[-1]
    elastic = render("ssh", replace(pack, hosts=HOSTS, least=1)).stages[-1]
    assert "torch.distributed" not in elastic.commands[0].argv[-1]
    [local] = render("local", replace(pack, nodes=1)).stages
    assert (local.commands[0].argv[3:], local.restarts) == (("steadytrain", "pack", "--procs", "4", "photos", "x"), 1)


def test_a_run_is_started_again_three_times_and_a_program_of_the_users_own_never() -> None:
    assert (Job(words=TRAIN).num_restarts, Job(words=("python", "x.py")).num_restarts) == (3, 0)
    assert (Job(words=TRAIN, restarts=0).num_restarts, Job(words=("python", "x.py"), restarts=2).num_restarts) == (0, 2)


def _policy(job: Job) -> tuple[int, list[tuple[str, object]]]:
    """How many pods may fail, and what is done about which exit code or condition."""
    spec = next(document for document in yaml.safe_load_all(render("kubernetes", job).files[0].text))["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    return spec["backoffLimit"], [
        (rule["action"], rule["onExitCodes"]["values"] if "onExitCodes" in rule else "disruption") for rule in rules
    ]


def test_that_another_rank_was_lost_is_no_pods_own_failure() -> None:
    job = next(
        document
        for document in yaml.safe_load_all(render("kubernetes", POD).files[0].text)
        if document["kind"] == "Job"
    )
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["action"] == "Ignore" and rules[0]["onExitCodes"]["values"] == [4, 75]
    assert job["spec"]["backoffLimit"] == 3, "a pod that fails is one failure, whatever becomes of the others"
    # Those of a JobSet that lost a rank must not decide whether it counts: the pod that failed does.
    assert _policy(SET) == (0, [("FailJob", [75]), ("Ignore", [4]), ("FailJob", "disruption")])


@pytest.mark.parametrize(("data", "cores"), [("photos", 7), ("s3://bucket/photos", 7), ("photos.rec", 4)])
def test_cores_are_asked_for_by_what_the_images_take_to_decode(data: str, cores: int) -> None:
    job = Job(words=("train", data, "--val", "val.rec"), procs=8, gpus=8, inputs=(data, "val.rec"))
    assert f"#SBATCH --cpus-per-task={cores}\n" in render("slurm", job).files[0].text
    assert job.cores == 8 * cores and replace(job, cpus=32).cores == 32 and replace(job, gpus=None).cores is None
    pods = render("kubernetes", replace(job, inputs=(), image="a"))
    assert f"each pod asks for {8 * cores} cores to decode images: --set cpus=N asks for N" in pods.notes


@pytest.mark.parametrize(("run", "place"), [("/data/runs/a", "/data/runs/a"), ("runs/a", "cats/runs/a")])
def test_where_the_run_is_written_is_said_as_it_will_be_found(run: str, place: str) -> None:
    job = replace(SSH, words=(*TRAIN, "--run", run), outputs=(run,))
    assert render("ssh", job).notes[0] == f"rank 0 runs on gpu1, and writes the run there, to {place}"


def test_further_words_go_to_srun_whole() -> None:
    job = replace(SLURM, options=(Slurm(srun=("--mpi=pmix", "--export=ALL,A=b c")),))
    assert "--cpus-per-task=8 --mpi=pmix '--export=ALL,A=b c' /opt/env/bin/python" in render("slurm", job).files[0].text


def test_ranks_run_in_a_container_of_pyxis() -> None:
    options = Slurm(mounts=("/mnt/photos:/data:ro", "/scratch"))
    words = ("train", "/data/a.rec", "--run", "/scratch/runs/a")
    job = Job(
        words=words,
        inputs=words[1:2],
        outputs=words[3:],
        image="nvcr.io#me/x:1",
        folder="/shared/me",
        options=(options,),
    )
    script = render("slurm", job).files[0].text
    assert (
        "srun --kill-on-bad-exit=1 '--container-image=nvcr.io#me/x:1'"
        " --container-mounts=/shared/me:/shared/me,/mnt/photos:/data:ro,/scratch:/scratch"
        " --container-workdir=/shared/me python3 -P -m steadytrain train" in script
    )
    with pytest.raises(InputError, match=r"not below .*/data or .*containers share: .*slurm\.mounts.*, or name"):
        render("slurm", replace(job, outputs=("/mnt/photos/runs",)))
    assert "--container" not in render("slurm", replace(job, image=None)).files[0].text

"""The command lines of MXNet's launch.py and dmlc's trackers, as their documents have them, start the same ranks."""

from __future__ import annotations

import pytest

from steadytrain.errors import InputError
from steadytrain.launch.trackers import translate

CASES = [
    # launch.py of MXNet 1.x, with the ssh launcher that it takes by default
    (
        "-n 2 -s 2 -H hosts --sync-dst-dir /tmp/cats --launcher ssh python train.py --kv-store dist_sync",
        "--on ssh --hosts hosts --set ranks=2 --sync /tmp/cats -- python train.py --kv-store dist_sync",
        [
            "-s 2 is ignored: ranks exchange gradients directly, and --engine async has one server",
            "2 workers become as many ranks",
        ],
    ),
    # the asynchronous engine has one server
    (
        "-n 2 -s 2 -H hosts train a.rec --engine async",
        "--hosts hosts --set ranks=2 -- train a.rec --engine async",
        [
            "-s 2 is ignored: ranks exchange gradients directly, and --engine async has one server",
            "2 workers become as many ranks",
        ],
    ),
    (
        "-n 4 --launcher local train a.rec",
        "--on local --set ranks=4 -- train a.rec",
        ["4 workers become as many ranks"],
    ),
    (
        "-n 4 -H hosts --env OMP_NUM_THREADS:3 train a.rec",
        "--hosts hosts --set ranks=4 --env OMP_NUM_THREADS=3 -- train a.rec",
        ["4 workers become as many ranks"],
    ),
    # dmlc-submit
    (
        "--cluster yarn --num-workers 2 --num-servers=0 --worker-cores 4 --worker-memory 8g --queue q train a.rec",
        "--on yarn --nodes 2 --set yarn.queue=q --set cpus=4 --set memory_gb=8 -- train a.rec",
        ["2 workers become as many ranks, one per machine"],
    ),
    (
        "--cluster slurm --slurm-worker-nodes 2 -n 4 --jobname cats train a.rec",
        "--on slurm --nodes 2 --set ranks=4 --set name=cats -- train a.rec",
        ["--slurm-worker-nodes 2 is --nodes", "4 workers become as many ranks"],
    ),
    (
        "--cluster kubernetes -n 2 --kube-namespace vision --kube-worker-image me/x:1 train a.rec",
        "--on kubernetes --nodes 2 --set kubernetes.namespace=vision --set image=me/x:1 -- train a.rec",
        ["2 workers become as many ranks, one per machine"],
    ),
    # the trackers of 2015
    (
        "-n 2 -s 1 -q q --vcores 2 -mem 1500 --max-attempts 3 -ac 1 -f a.py -- train a.rec",
        "--set ranks=2 --set yarn.queue=q --set restarts=2 --set cpus=2 --set memory_gb=2 -- train a.rec",
        [
            "-s 1 is ignored: ranks exchange gradients directly, and --engine async has one server",
            "-ac 1 is ignored: files are not shipped: --sync copies the working directory; put other files into "
            "images or"
            " on shared disks",
            "-f a.py is ignored: files are not shipped: --sync copies the working directory; put other files into "
            "images"
            " or on shared disks",
            "2 workers become as many ranks",
        ],
    ),
    # our own words are left as they are, with and without the dashes
    ("--on mpi --procs 2 --dry-run train a.rec --run x", "--on mpi --procs 2 --dry-run -- train a.rec --run x", []),
    ("--nodes 2:4 --hosts h -- train -n 2 -s 2", "--hosts h --nodes 2:4 -- train -n 2 -s 2", []),
    ("--nodse 2 -- train", "--nodse -- 2 -- train", []),
    ("--help", "--help", []),
]


@pytest.mark.parametrize(("old", "new", "notes"), CASES)
def test_old_words_become_ours(old: str, new: str, notes: list[str]) -> None:
    translation = translate(old.split())
    assert list(translation.argv) == new.split()
    assert list(translation.notes) == notes


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ("--launcher sge -n 2 train", "sge is not supported"),
        ("--cluster mesos -n 2 train", "mesos is not supported"),
        ("--launcher shh -n 2 train", "Did you mean ssh?"),
        ("--mesos-master zk -n 2 train", "Mesos is not supported"),
        ("--kube-worker-template a.yaml train", "--dry-run -o FOLDER"),
        ("--worker-memory lots train", "a size such as 2g"),
        ("-n", "-n needs a value"),
    ],
)
def test_what_nothing_answers_to_is_refused_with_the_reason(old: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        translate(old.split())
    assert message in str(caught.value)

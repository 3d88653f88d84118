"""The command lines of MXNet's launch.py, as their documents have them, start the same ranks."""

from __future__ import annotations

import pytest

from steadytrain.errors import InputError
from steadytrain.interop.mxnet.launchers import translate

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
    (
        "--cluster kubernetes -n 2 train a.rec",
        "--on kubernetes --nodes 2 -- train a.rec",
        ["2 workers become as many ranks, one per machine"],
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
        ("--cluster yarn -n 2 train", "yarn is not supported"),
        ("-n", "-n needs a value"),
    ],
)
def test_what_nothing_answers_to_is_refused_with_the_reason(old: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        translate(old.split())
    assert message in str(caught.value)

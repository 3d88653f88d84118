"""The asynchronous engine as users start it: workers and servers on Ray, killed and resumed."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from steadytrain import events
from steadytrain.cli import main
from steadytrain.config import Data, Model, Optim, Parallel, Precision, Recipe
from steadytrain.errors import RecipeError
from steadytrain.events import Ended, Evaluated, Noticed, Saved, ServerStats, Started, Step
from steadytrain.launch.workers import SCRATCH
from steadytrain.run import Run
from steadytrain.training import checkpoints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray's actors are measured on Linux")
SETTINGS = ["--model", "digits", "--epochs", "12", "--batch-size", "32", "--lr", "0.05", "--device", "cpu"]
SETTINGS += ["--set", "parallel.compute_threads=1", "--set", "every.log_steps=5", "--set", "data.pad=1"]
SETTINGS += ["--set", "data.holdout=0.2", "--threads", "1"]
ASYNC = ["--engine", "async", "--workers", "2"]
EPOCHS = 12
STEPS = 10 * EPOCHS  # 320 images in batches of 32


def start(digits: Path, run: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "steadytrain", "train", str(digits), "--run", str(run), *SETTINGS, *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **variables}
    )


def trained(digits: Path, run: Path, *words: str, **variables: str) -> str:
    """What was printed by a run that went well."""
    child = start(digits, run, *words, **variables)
    output, _ = child.communicate(timeout=240)
    assert child.returncode == 0, output
    return output


def of_kind(run: Path, kind: type[events.Event], rank: int = 0) -> list[events.Event]:
    return [event for event in Run.open(run).events(rank) if isinstance(event, kind)]


def pushes(run: Path, rank: int) -> int:
    return sum(event.pushes for event in of_kind(run, ServerStats, rank) if isinstance(event, ServerStats))


def weights(run: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(run / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "running_" not in name and "num_batches" not in name}


def wait_for_step(child: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    path = run / "events.jsonl"
    while child.poll() is None and time.monotonic() < deadline:
        if path.exists() and max((e.step for e in events.read(path) if isinstance(e, Step)), default=0) >= step:
            return
        time.sleep(0.02)


def worker(child: subprocess.Popen[str], rank: int) -> psutil.Process:
    for process in psutil.Process(child.pid).children():
        if "STEADYTRAIN_SERVERS" in process.environ() and process.environ()["RANK"] == str(rank):
            return process
    raise AssertionError(f"no worker {rank}")


def family(child: subprocess.Popen[str]) -> list[psutil.Process]:
    """A command and its descendants; none where it has ended."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(child.pid)
        return [parent, *parent.children(recursive=True)]
    return []


def servers(child: subprocess.Popen[str]) -> list[psutil.Process]:
    found = list[psutil.Process]()
    for process in family(child):
        with contextlib.suppress(psutil.Error):  # Ray's own come and go
            found += [process] if "ParameterServer" in " ".join(process.cmdline()) else []
    return found


def listening(child: subprocess.Popen[str]) -> set[str]:
    """The addresses at which a command and its descendants listen."""
    addresses = set[str]()
    for process in family(child):
        with contextlib.suppress(psutil.Error):
            sockets = process.net_connections(kind="inet")
            addresses |= {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    return addresses


@dataclass(frozen=True)
class Whole:
    """A run by two workers from beginning to end, what it printed, and meanwhile where it listened and
    how nice its server was, when they were seen last."""

    run: Path
    told: str
    addresses: set[str]
    niceness: list[int]


@pytest.fixture(scope="module")
def trained_whole(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    if find_spec("ray") is None:
        pytest.skip("no ray here")
    run = tmp_path_factory.mktemp("async") / "whole"
    child = start(digits, run, *ASYNC)
    addresses, niceness = set[str](), dict[int, int]()
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(child.communicate, timeout=240)
        while not output.done():  # its few updates may be over before anybody sees the first of them
            addresses |= listening(child)
            for process in servers(child):
                with contextlib.suppress(psutil.Error):
                    niceness[process.pid] = process.nice()
            time.sleep(0.5)
    assert child.returncode == 0, output.result()
    return Whole(run, output.result()[0], addresses, [*niceness.values()])


@pytest.fixture
def whole(trained_whole: Whole) -> Path:
    return trained_whole.run


def test_nothing_listens_beyond_this_machine(trained_whole: Whole) -> None:
    assert trained_whole.addresses, "Ray was there"
    assert {
        ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback for address in trained_whole.addresses
    } == {True}


def test_the_server_has_the_priority_of_its_command(trained_whole: Whole) -> None:
    assert trained_whole.niceness == [psutil.Process().nice()]


def test_ray_says_nothing(trained_whole: Whole) -> None:
    assert not re.search(r"\bray\b|token", trained_whole.told, re.IGNORECASE)


def test_the_start_says_what_is_done_against_stale_gradients(trained_whole: Whole) -> None:
    text = " ".join(trained_whole.told.split())
    assert "momentum 0.9 of each worker" in text
    assert "divided by 1 + the updates that a push has missed" in text


def test_workers_make_all_updates_of_the_run_between_them(whole: Path) -> None:
    [ended] = of_kind(whole, Ended)
    assert isinstance(ended, Ended) and (ended.status, ended.step, ended.images) == ("finished", STEPS, 32 * STEPS)
    assert pushes(whole, 0) + pushes(whole, 1) == STEPS
    assert pushes(whole, 0) > 0 and pushes(whole, 1) > 0
    steps = [event.step for event in of_kind(whole, Step) if isinstance(event, Step)]
    assert steps == sorted(steps) and steps[-1] == STEPS


@pytest.fixture(scope="module")
def alone(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples, trained on by one process."""
    run = tmp_path_factory.mktemp("async") / "alone"
    assert main(["train", str(digits), "--run", str(run), *SETTINGS]) == 0
    return run


def test_it_learns_as_one_process_does(whole: Path, alone: Path) -> None:
    """Of the 80 held-out images, four seeds had at most one more wrong than one process (0.938 to 1.0 right)."""
    evaluated = [event for event in of_kind(whole, Evaluated) if isinstance(event, Evaluated)]
    assert len(evaluated) == EPOCHS and evaluated[-1].step == STEPS
    [*_, oracle] = of_kind(alone, Evaluated)
    assert isinstance(oracle, Evaluated) and evaluated[-1].top1 >= oracle.top1 - 0.1  # 8 images


def test_staleness_and_bytes_are_told(whole: Path) -> None:
    events = [event for event in of_kind(whole, ServerStats, 1) if isinstance(event, ServerStats) and event.pushes]
    parameters = sum(tensor.numel() for tensor in weights(whole).values())
    for event in events:
        assert 0 <= event.staleness <= event.staleness_max < STEPS
        assert sum(server["pushed_bytes"] for server in event.servers) == 4 * parameters * event.pushes
    [started] = of_kind(whole, Started)
    assert isinstance(started, Started) and len(started.machine["servers"]) == 1 and started.machine["ranks"] == 2


def test_the_checkpoint_is_that_of_one_process(whole: Path, alone: Path) -> None:
    """Any engine goes on from it: the optimizer's state is whole."""
    state = checkpoints.load(checkpoints.saved(whole / "checkpoints")[-1])
    last = checkpoints.load(checkpoints.saved(alone / "checkpoints")[-1])
    assert state["optimizer"]["state"].keys() == last["optimizer"]["state"].keys()
    for number, values in last["optimizer"]["state"].items():
        saved = state["optimizer"]["state"][number]
        assert {name: tuple(value.shape) for name, value in saved.items()} == {
            name: tuple(value.shape) for name, value in values.items()
        }
    assert state["cursor"] == {"step": STEPS, "position": 32 * STEPS}
    assert state["engine"]["async"] == {"unfinished": [], "after": STEPS}


def test_without_ray_the_extra_is_named(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", str(digits), "--run", str(tmp_path / "run"), *ASYNC]) == 2
    assert "pip install 'steadytrain[async]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"precision": Precision("fp16")}, "precision.name='fp16'"),
        ({"optim": Optim(schedule="plateau")}, "optim.schedule='plateau'"),
        ({"model": Model("resnet20", batch_norm="synchronous")}, "model.batch_norm='synchronous'"),
        ({"model": Model("resnet20", train="head:1+full")}, "model.train='head:1+full'"),
        ({"parallel": Parallel(engine="async", graph=True)}, "parallel.graph=True"),
    ],
)
def test_what_workers_cannot_do_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(RecipeError, match="exclude each other") as refused:
        Recipe(**{"data": Data(train="x"), "model": Model("resnet20"), "parallel": Parallel(engine="async"), **changes})  # type: ignore[arg-type]
    assert named in str(refused.value)


COUNTING = """
import hashlib, os, zlib
import torch
from torch import nn

class Passing(torch.autograd.Function):
    # Logits as they are; whatever the loss, the gradient of the counts is -1 for each image of the batch.
    @staticmethod
    def forward(ctx, logits, counts, ids):
        ctx.save_for_backward(ids)
        ctx.size = len(counts)
        return logits.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None, -torch.bincount(ctx.saved_tensors[0], minlength=ctx.size).float(), None

class Counting(nn.Module):
    # With a rate of 1 its weights count in how many updates an image was; writes down what it was trained on.
    def __init__(self, num_classes):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(4096))
        self.register_buffer("last", torch.ones(64, num_classes))
        self.itself = id(self)  # and no copy of it, on which passes are measured
        self.file = os.path.join(os.environ["SEEN"], f"{os.environ.get('RANK', 0)}-{os.getpid()}")

    def forward(self, images):
        flat = images.flatten(1)
        logits = flat @ self.last
        flat = flat[flat.std(1) > 0]  # a model is tried on blank ones
        if not self.training or not len(flat) or self.itself != id(self):
            return logits
        ids = [zlib.crc32(image.tobytes()) % 4096 for image in flat.detach().numpy()]
        with open(self.file, "a") as file:
            file.write("".join(f"{id}\\n" for id in ids))
        return Passing.apply(logits, self.counts, torch.tensor(ids))

def make(num_classes, **options):
    return Counting(num_classes)
"""
EXACT = ["--model", "counting:make", "--lr", "1", "--weight-decay", "0"]
for _setting in ("optim.momentum=0", "optim.nesterov=false", "optim.base_batch_size=null"):
    EXACT += ["--set", _setting]
for _setting in ("optim.schedule=constant", "optim.warmup_epochs=0", "parallel.staleness_power=0"):
    EXACT += ["--set", _setting]
for _setting in ("data.augment=none", "data.flip=none", "data.pad=0"):
    EXACT += ["--set", _setting]


@dataclass(frozen=True)
class Counted:
    """A run whose weights count in how many updates each image was."""

    run: Path
    seen: Path

    @property
    def variables(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(self.seen.parent), os.environ.get("PYTHONPATH"))))
        return {"PYTHONPATH": path, "SEEN": str(self.seen)}

    def computed(self) -> Counter[int]:
        """How often workers computed the gradient of each image, by its id."""
        return Counter(int(line) for file in self.seen.iterdir() for line in file.read_text().split())

    def wait_for_trainees(self, child: subprocess.Popen[str], rank: int, count: int) -> None:
        """Until so many processes, one the successor of the other, have trained as a worker, and a moment longer."""
        deadline = time.monotonic() + 60
        while len(list(self.seen.glob(f"{rank}-*"))) < count and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)

    def applied(self) -> torch.Tensor:
        return load_file(self.run / "model.safetensors")["counts"]


@pytest.fixture
def counted(digits: Path, tmp_path: Path) -> Counted:
    (tmp_path / "counting.py").write_text(COUNTING)
    (tmp_path / "seen").mkdir()
    return Counted(tmp_path / "run", tmp_path / "seen")


@pytest.mark.slow
def test_each_image_is_in_one_update_an_epoch(digits: Path, counted: Counted) -> None:
    trained(digits, counted.run, *ASYNC, *EXACT, **counted.variables)
    computed, applied = counted.computed(), counted.applied()
    assert computed.total() == EPOCHS * 320
    assert {id: int(count) for id, count in enumerate(applied.tolist()) if count} == computed
    assert all(count % EPOCHS == 0 for count in computed.values())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_where_workers_are_killed_no_update_is_lost_and_none_made_twice(
    digits: Path, counted: Counted, rank: int
) -> None:
    words = [*ASYNC, *EXACT, "--epochs", "800", "--set", "parallel.restarts=20"]
    child = start(digits, counted.run, *words, **counted.variables)
    kills = 2
    for number in range(kills):
        counted.wait_for_trainees(child, rank, number + 1)
        worker(child, rank).kill()
    counted.wait_for_trainees(child, rank, kills + 1)
    output, _ = child.communicate(timeout=240)
    assert child.returncode == 0, output
    assert output.count(f"worker {rank} was killed by SIGKILL") == kills and "it is started again" in output
    assert of_kind(counted.run, Ended)[-1].step == 8000  # type: ignore[attr-defined]
    applied, computed = counted.applied(), counted.computed()
    assert (applied % 800 == 0).all(), "each image in 800 updates, no more and no less"
    assert int(applied.sum()) == 800 * 320
    lost = computed.total() - 800 * 320
    assert lost % 32 == 0 and 0 <= lost <= 32 * kills, "gradients that a killed worker had computed and not pushed"
    assert len(list(counted.seen.glob(f"{rank}-*"))) == kills + 1, "each successor trained"


@pytest.mark.slow
def test_a_killed_server_is_recovered_from_the_last_checkpoint(digits: Path, counted: Counted) -> None:
    words = [*ASYNC, *EXACT, "--epochs", "100", "--set", "every.save_steps=20"]
    child = start(digits, counted.run, *words, **counted.variables)
    wait_for_step(child, counted.run, 200)
    servers(child)[0].kill()
    output, _ = child.communicate(timeout=240)
    assert child.returncode == 0, output
    assert "a server was lost: all start again from the last checkpoint" in output
    ended = of_kind(counted.run, Ended)[-1]
    assert isinstance(ended, Ended) and (ended.status, ended.step) == ("finished", 1000)
    assert of_kind(counted.run, Started)[-1].step >= 160  # type: ignore[attr-defined]
    applied = counted.applied()
    assert (applied % 100 == 0).all() and int(applied.sum()) == 100 * 320, "each image in 100 updates"


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = start(digits, run, *ASYNC, "--epochs", "100")
    wait_for_step(child, run, 100)
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 75, output
    saved = of_kind(run, Saved)[-1]
    assert isinstance(saved, Saved) and saved.step >= 100
    trained(digits, run, *ASYNC, "--epochs", "100")
    assert of_kind(run, Started)[-1].step == saved.step  # type: ignore[attr-defined]
    assert of_kind(run, Ended)[-1].step == 1000  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_run_that_was_killed_whole_is_resumed_by_another_engine(digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = start(digits, run, *ASYNC, "--epochs", "100", "--set", "every.save_steps=20")
    wait_for_step(child, run, 100)
    victims = psutil.Process(child.pid).children(recursive=True)
    commands = " ".join(word for victim in victims for word in victim.cmdline())
    [left] = {Path(name) for name in re.findall(rf"{SCRATCH.parent}/\.{SCRATCH.name}\.\w+-\w+", commands)}
    child.kill()
    child.wait()
    for process in victims:  # Ray's own and the workers end with their parent
        process.wait(60)
    assert left.is_dir(), "nobody was there to remove Ray's files"
    other = start(digits, tmp_path / "other", *ASYNC)
    wait_for_step(other, tmp_path / "other", 1)
    assert not left.exists(), "the next command has removed them"
    other.terminate()
    other.communicate(timeout=60)
    words = ["--epochs", "100", "--set", "every.save_steps=20"]
    assert main(["train", str(digits), "--run", str(run), *SETTINGS, *words]) == 0
    assert of_kind(run, Ended)[-1].step == 1000  # type: ignore[attr-defined]
    assert of_kind(run, Started)[-1].step >= 60  # type: ignore[attr-defined]
    assert not [event for event in of_kind(run, Noticed) if "damaged" in str(event)]


@pytest.mark.slow
def test_ranks_of_another_launcher_are_workers(digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--log-dir={tmp_path}"]
    command = [*launcher, "-m", "--", "steadytrain", "train", str(digits), "--run", str(run), *SETTINGS]
    command += ["--engine", "async", "--epochs", "200"]

    def outcome(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **variables}
        return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)

    without = outcome()
    assert without.returncode != 0 and "set RAY_AUTH_TOKEN" in without.stderr
    done = outcome(RAY_AUTH_TOKEN="0" * 64)
    assert done.returncode == 0, done.stderr
    assert of_kind(run, Ended)[-1].step == 2000  # type: ignore[attr-defined]
    assert pushes(run, 0) + pushes(run, 1) == 2000 and pushes(run, 0) > 0 and pushes(run, 1) > 0

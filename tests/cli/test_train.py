"""``steady train`` as it is typed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from steadytrain.cli import main
from steadytrain.cli.options import TrainingOptions
from steadytrain.cli.train import _note_fewer_ranks, _only_first_rank_prints
from steadytrain.config import Recipe
from steadytrain.distributed.world import World
from steadytrain.errors import RankLostError
from steadytrain.events import Ended, Started
from steadytrain.run import Run
from steadytrain.training import steps

QUICK = ["--model", "mlp", "--epochs", "1", "--batch-size", "32", "--device", "cpu"]


@pytest.fixture
def photos(write_digits: Callable[[Path, int, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``photos/`` in the working directory: 80 digits of two classes."""
    monkeypatch.chdir(tmp_path)
    return write_digits(tmp_path / "photos", 80, 2)


def test_folders_are_packed_before_the_run_and_their_reuse_is_said_once(
    photos: Path, write_digits: Callable[[Path, int, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(photos.parent / "others", 40, 2)
    assert main(["train", "photos", "--val", "others", *QUICK]) == 0
    first, _, after = capsys.readouterr().err.partition("started attempt=1")
    assert [line.split(" once ")[0].split(":")[0] for line in first.splitlines()] == [
        "reading photos",
        "packing photos",
        "packing images",
        "packing others",
        "packing images",
    ]
    assert "packed copy" not in after and "packing" not in after
    assert main(["train", "photos", *QUICK, "--seed", "1"]) == 0
    assert capsys.readouterr().err.count("using the packed copy of photos") == 1


def test_lists_start_from_the_root_that_is_given(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("lists").mkdir()
    names = sorted(path.relative_to("photos") for path in Path("photos").rglob("*.png"))
    lines = [f"{number}\t{int(name.parent.name)}\t{name}\n" for number, name in enumerate(names)]
    Path("lists/train.lst").write_text("".join(lines[::2]))
    table = [f"{name},{int(name.parent.name)}\n" for name in names[1::2]]
    Path("lists/val.csv").write_text("".join(["path,label\n", *table]))
    words = ["train", "lists/train.lst", "--val", "lists/val.csv", "--run", "runs/a", *QUICK]
    assert main(words) == 2
    assert "with --root" in capsys.readouterr().err
    assert main([*words, "--root", "photos"]) == 0
    assert Run.open("runs/a").recipe.data.root == "photos"
    assert main([*words, "--root", "photos", "--set", "every.log_steps=1"]) == 0  # the same run: it has ended
    capsys.readouterr()
    assert main(["evaluate", "runs/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == len(names) // 2


def test_a_file_of_labels_serves_images_without_folders(photos: Path) -> None:
    Path("flat").mkdir()
    lines = ["file,label\n"]
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        path.rename(f"flat/{number:03}.png")
        lines.append(f"{number:03}.png,{path.parent.name}\n")
    Path("labels.csv").write_text("".join(lines))
    assert main(["train", "flat", "--labels", "labels.csv", "--run", "runs/a", *QUICK]) == 0
    assert Run.open("runs/a").recipe.data.labels == "labels.csv"


@pytest.mark.slow
def test_a_probe_is_told_before_the_first_update(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.training.profile.probe.SECONDS", 0.3)
    assert main(["train", "photos", "--run", "runs/a", "--probe", *QUICK]) == 0
    errors = capsys.readouterr().err
    assert re.search(r"^probed step=0 feed_images_per_second=\S+ compute_images_per_second=\S+", errors, re.MULTILINE)
    assert errors.index("probed step=0") < errors.index("evaluated step=")


def test_a_finished_run_is_trained_on_from_its_weights_by_the_command_that_is_offered(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "photos", *QUICK, "--run", "runs/a"]
    assert main(words) == 0
    assert main([*words, "--epochs", "2"]) == 2
    offered = re.search(r"it is finished; .*, give this command (.*)", capsys.readouterr().err)
    assert offered is not None
    assert main([*words, "--epochs", "2", *shlex.split(offered[1])]) == 0
    more = Run.open("runs/a-more")
    assert more.recipe.model.weights == "runs/a/model.safetensors" and more.finished() is not None


def test_a_command_that_is_refused_leaves_no_run_and_reads_no_data(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "photos", *QUICK, "--run", "runs/a"]) == 0
    other = tmp_path / "w.pth"
    torch.save({"layer.weight": torch.zeros(3, 3)}, other)
    capsys.readouterr()
    for words, message in (
        (["--model", "mlp", "--device", "cuda:9"], "cuda:9"),
        (["--model", "resnet5O"], "there is no model 'resnet5O'"),
        (["--model", "timm/test_resnet", "--weights", str(other)], "do not fit"),
        (["--model", "mlp", "--weights", str(photos)], "is a folder"),
    ):
        assert main(["train", "photos", *words]) == 2
        said = capsys.readouterr().err
        assert message in said and "packed" not in said
        assert [path.name for path in Path("runs").iterdir()] == ["a"]


def test_what_is_refused_once_the_run_was_made_takes_its_folder_along(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("nets.py").write_text("def small(num_classes, **shape):\n    return num_classes / 0\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    words = ["train", "photos", *QUICK, "--model", "nets:small"]
    assert main([*words, "--repeats", "2"]) == main(words) == 2
    assert "division by zero" in capsys.readouterr().err and list(Path("runs").iterdir()) == []
    taken = Run.create("runs/mine", Recipe.from_dict({"data": {"train": "photos"}, "model": {"name": "nets:small"}}))
    assert main(["resume", "runs/mine"]) == 2 and taken.directory.exists()  # this command has not made it


def test_longer_training_of_a_run_that_has_not_ended_names_both_ways(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "photos", "--model", "mlp", "--batch-size", "32", "--device", "cpu", "--run", "runs/a"]
    assert main([*words, "--epochs", "4", "--until", "1"]) == 75
    capsys.readouterr()
    assert main([*words, "--epochs", "5"]) == 2
    said = capsys.readouterr().err
    assert "budget.epochs: 4.0 -> 5.0" in said and "steady resume runs/a finishes it as it was planned" in said
    assert main(["resume", "runs/a"]) == 0
    assert main([*words, "--epochs", "5"]) == 2
    assert "--weights runs/a/model.safetensors --run runs/a-more" in capsys.readouterr().err


def test_a_run_of_another_model_is_named_before_weights_are_fetched(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(photos))
    assert main(["train", "photos", *QUICK, "--run", "runs/a"]) == 0
    capsys.readouterr()
    assert main(["finetune", "photos", "--run", "runs/a"]) == 2
    said = capsys.readouterr().err
    assert "runs/a holds a run of another recipe (model.name: 'mlp' -> 'timm/" in said and "cannot fetch" not in said
    for words in (["--budget-minutes", "3"], ["--explain"]):  # a plan may have chosen its model; nothing is trained
        main(["finetune", "photos", "--run", "runs/a", *words])
        assert "another recipe" not in capsys.readouterr().err


def test_a_plateau_of_a_run_that_began_keeps_its_evaluations(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "photos", "--model", "mlp", "--batch-size", "32", "--device", "cpu", "--run", "runs/a"]
    words += ["--schedule", "plateau", "--epochs", "4"]
    assert main([*words, "--until", "1"]) == 75
    before = Path("runs/a/recipe.json").read_bytes()
    capsys.readouterr()
    assert main([*words, "--set", "every.evaluate_epochs=2"]) == 2
    assert "every.evaluate_epochs: 1.0 -> 2.0" in capsys.readouterr().err
    assert Path("runs/a/recipe.json").read_bytes() == before


def test_a_run_is_gone_on_with_by_its_folder_alone(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "photos", "--run", "runs/a", *QUICK]) == 0
    assert "\nlearning rate 0.025 = 0.1 x 32/128, warm-up" in capsys.readouterr().err
    assert main(["train", "runs/a", *QUICK]) == 2
    assert "runs/a is a run, not data: steady resume runs/a" in capsys.readouterr().err
    for words in (["resume", "runs/a"], ["train", "--run", "runs/a"], ["resume", "runs/a", "--device", "cpu"]):
        assert main(words) == 0
        assert "runs/a is finished" in capsys.readouterr().err
    assert main(["resume", "runs/a", "--lr", "9"]) == 2
    assert "optim.lr: 0.1 -> 9" in capsys.readouterr().err
    assert main(["resume", "photos"]) == 2
    assert "photos is not a run" in capsys.readouterr().err
    assert main(["resume", "runs/a", "--run", "runs/b"]) == 2
    assert "steady resume runs/a continues in that folder: leave out --run runs/b" in capsys.readouterr().err


def test_repeats_train_each_seed_once_and_tell_the_mean(
    photos: Path, weights: Callable[[Path], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "photos", "--run", "runs/a", *QUICK, "--epochs", "3"]
    alone = ["train", "photos", "--run", "runs/alone", "--seed", "1", *QUICK, "--epochs", "3"]
    assert main(alone) == 0
    recipe = Run.open("runs/alone").recipe.with_(seed=0)
    cut_off = Run.create_repeats("runs/a", recipe, 2)
    half = steps(cut_off[1], stop=lambda: "SIGTERM" if cut_off[1].progress().position > 32 else None)
    assert [event.status for event in half if isinstance(event, Ended)] == ["preempted"]
    assert main([*words, "--repeats", "2"]) == 0
    assert weights(Path("runs/a/seed-1")) == weights(Path("runs/alone")), "it went on as if nothing had happened"
    first = Path("runs/a/seed-0/model.safetensors")
    before, _ = first.stat().st_mtime_ns, capsys.readouterr()
    assert main([*words, "--repeats", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "runs/a/seed-0 is finished" in err and first.stat().st_mtime_ns == before
    document = json.loads(out)
    assert [run["seed"] for run in document["runs"]] == [0, 1, 2]
    (group,) = document["repeats"]
    tops = [run["last"]["top1"] for run in document["runs"]]
    assert (group["name"], group["last_top1"]["mean"]) == ("a", pytest.approx(sum(tops) / 3))
    assert main(["report", "runs/a", "-o", "-"]) == 0
    assert "## Repeats" in capsys.readouterr().out


def test_repeats_are_at_least_two_and_have_a_folder_of_their_own(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "photos", *QUICK, "--repeats", "1"]) == 2
    assert "--repeats is 1; it must be from 2 to 1000" in capsys.readouterr().err
    assert main(["train", "photos", "--run", "runs/a", *QUICK]) == 0
    assert main(["train", "photos", "--run", "runs/a", *QUICK, "--repeats", "2"]) == 2
    assert "runs/a is a run; repeats need another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "hosts", "expected"),
    [
        ("torchrun", ["a"] * 8, "steady resume {run} --procs 8 starts as many on this machine"),
        ("torchrun", ["a"] * 4 + ["b"] * 4, "steady launch --hosts FILE --nodes 2 --procs 4 -- resume {run} starts as"),
        ("Slurm", ["a"] * 4 + ["b"] * 4, "steady launch --on slurm --nodes 2 --procs 4 -- resume {run}"),
        ("Slurm", ["a"] * 8, "steady launch --on slurm --nodes 1 --procs 8 -- resume {run}"),
        (
            "Kubernetes",
            ["a-0", "a-1"],
            "steady launch --on kubernetes --set image=NAME --set kubernetes.claim=NAME --nodes 2 --procs 1 -- resume",
        ),
        ("Open MPI", ["a", "b"], "steady launch --on mpi --hosts FILE --nodes 2 --procs 1 -- resume {run}"),
        ("steady launch", ["a"] * 2 + ["b"] * 3, "with one: steady resume {run} --procs 5 starts as many"),
    ],
)
def test_a_run_that_a_launcher_started_says_how_it_is_resumed_as_it_was_launched(
    recipe: Recipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    launcher: str,
    hosts: list[str],
    expected: str,
) -> None:
    run = Run.create(tmp_path / "run", recipe)
    machine = {"ranks": len(hosts), "hosts": hosts, "launcher": launcher}
    with run.log() as log:
        log.append(Started(digest=recipe.digest, step=0, steps=20, steps_per_epoch=10, batch_size=32, machine=machine))
    _note_fewer_ranks(run, TrainingOptions(run=str(run.directory)))
    said = capsys.readouterr().err
    assert f"had {len(hosts)} ranks" in said and f"started by {launcher}, and resumes with one" in said
    assert expected.format(run=run.directory) in said and said.count("\n") == 1


def test_torchruns_dashes_behind_the_module_are_told(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in ``torchrun --nproc-per-node=2 -m steadytrain train photos -- --run R``."""
    assert main(["train", "photos", "--", "--run", "R"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("steady: Unknown option: --run. Behind two dashes nothing is an option")
    assert "torchrun --nproc-per-node=2 -m -- steadytrain train" in said and "Did you mean" not in said


@pytest.mark.parametrize(
    ("local_rank", "says_so", "is_raised"),
    [(0, None, True), (1, None, False), (1, True, True), (0, False, False)],
)
def test_one_rank_of_each_machine_says_that_the_first_rank_is_gone(
    local_rank: int, says_so: bool | None, is_raised: bool
) -> None:
    error = RankLostError("rank 0 on gpu1 is gone")
    error.says_so = says_so
    world = World(rank=2 + local_rank, size=4, local_rank=local_rank, local_size=2)
    with pytest.raises(RankLostError if is_raised else SystemExit), _only_first_rank_prints(world):
        raise error

"""A user's mistake is one clear line with the remedy, exit code 2 or 1, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.forked import start

from steadytrain.cli import main
from steadytrain.errors import InputError

QUICK = ["--model", "digits", "--epochs", "1", "--batch-size", "32", "--device", "cpu", "--set", "data.pad=1"]


class Said:
    """What one command line printed and returned."""

    def __init__(self, code: int, out: str, error: str) -> None:
        self.code, self.out, self.error = code, out, error

    @property
    def lines(self) -> list[str]:
        return [line for line in self.error.splitlines() if line.startswith("steady: ")]


@pytest.fixture
def steady(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """``steady("train", folder)`` in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Said:
        code = main([str(word) for word in words])
        out, error = capfd.readouterr()
        assert "Traceback" not in error
        return Said(code, out, error)

    return run


def _refused(output: Said, code: int, *parts: str) -> None:
    assert output.code == code, output.error
    assert len(output.lines) == 1, output.error
    for part in parts:
        assert part in output.lines[0]


def test_a_missing_folder(steady: Callable[..., Said]) -> None:
    _refused(steady("train", "no/such/photos", *QUICK), 2, "no/such/photos")
    assert not Path("runs").exists()


def test_an_empty_class(steady: Callable[..., Said], write_digits: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_digits(tmp_path / "digits", 60, 3)
    (folder / "lonely").mkdir()
    _refused(steady("train", folder, *QUICK), 2, "lonely")


def test_one_class_only(steady: Callable[..., Said], write_digits: Callable[..., Path], tmp_path: Path) -> None:
    _refused(steady("train", write_digits(tmp_path / "digits", 20, 1), *QUICK), 2, "class", "two")


def test_an_unreadable_file_is_named_and_passed_over(
    steady: Callable[..., Said], write_digits: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_digits(tmp_path / "digits", 60, 3)
    (folder / "1" / "broken.png").write_bytes(b"<html>not found</html>")
    output = steady("train", folder, *QUICK)
    assert output.code == 0, output.error
    assert "broken.png" in output.error


def test_too_many_unreadable_files(
    steady: Callable[..., Said], write_digits: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_digits(tmp_path / "digits", 60, 3)
    for k in range(6):
        (folder / "1" / f"broken{k}.png").write_bytes(b"<html>not found</html>")
    _refused(steady("pack", folder, tmp_path / "out"), 1, "6", "--max-bad")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["train", "x", "--epoch", "3"], "--epochs"),
        (["trian", "x"], "train"),
        (["train", "x", "--batchsize", "3"], "--batch-size"),
    ],
)
def test_a_typo_in_a_flag_or_verb(steady: Callable[..., Said], words: list[str], near: str) -> None:
    _refused(steady(*words), 2, "Did you mean", near)


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("--fuser", "Instead: --compile compiles the network (torch.compile)."),
        ("--resume", "steady resume RUN"),
        ("--output", "--run FOLDER"),
        ("--early-stopping", "--patience 3"),
        ("--freeze", "--set model.freeze=conv_stem"),
        ("--aug-splits", "Not supported yet: splitting a batch"),
        ("--mix", "Instead: --transforms"),
        ("--drop-connect", "--set model.options.drop_path_rate=0.1"),
        ("--tta", "steady evaluate RUN --tta flip"),
        ("--frobnicate", "steady train --help"),
    ],
)
def test_a_flag_of_another_trainer_has_an_answer(steady: Callable[..., Said], word: str, part: str) -> None:
    output = steady("train", "x", word, "1")
    _refused(output, 2, f"Unknown option: {word}.", part)
    assert "Did you mean" not in output.error


def test_what_another_verb_calls_otherwise_is_named(steady: Callable[..., Said]) -> None:
    _refused(steady("evaluate", "x", "--workers", "2"), 2, "Did you mean --threads?")
    _refused(steady("fit", "x"), 2, "Instead: steady train x")
    _refused(steady("frob"), 2, "There are: demo, fetch, pack")


def test_flags_of_other_trainers_that_are_the_same_are_aliases(steady: Callable[..., Said], digits: Path) -> None:
    words = ["--opt", "sgd", "--wd=0.01", "--sched", "poly", "--momentum", "0.8", "--smoothing", "0.2"]
    words += ["--clip-grad", "2", "--max-epochs", "3", "--ema", "0.9", "--holdout", "0.3", "--warmup-epochs", "0"]
    output = steady("train", digits, *QUICK[:2], *QUICK[4:], *words, "--explain", "--json")
    recipe = json.loads(output.out)["recipe"]
    optim = {"name": "sgd", "weight_decay": 0.01, "schedule": "poly", "momentum": 0.8, "label_smoothing": 0.2}
    optim |= {"clip_norm": 2.0, "ema": 0.9, "warmup_epochs": 0.0}
    assert {key: recipe["optim"][key] for key in optim} == optim
    assert recipe["budget"]["epochs"] == 3 and recipe["data"]["holdout"] == 0.3
    assert recipe["optim"]["lr"] == 0.1
    _refused(steady("train", digits, "--momentum"), 2, "--momentum needs a value", "optim.momentum")


def test_another_optimizer_has_its_own_usual_rate(steady: Callable[..., Said], digits: Path) -> None:
    def optim(*words: str) -> dict[str, object]:
        document: dict[str, dict[str, dict[str, object]]] = json.loads(
            steady("train", digits, *QUICK, *words, "--explain", "--json").out
        )
        return document["recipe"]["optim"]

    chosen = optim("--optimizer", "adamw", "--ema", "0")
    assert (chosen["lr"], chosen["base_batch_size"], chosen["ema"]) == (1e-3, None, None)
    assert optim("--optimizer", "adamw", "--lr", "0.5")["lr"] == 0.5


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("optim.wd=0.1", "Did you mean optim.weight_decay?"),
        ("optim.optimizer=adamw", "Did you mean optim.name?"),
        ("wd=0.1", "Did you mean optim.weight_decay?"),
        ("data.mixup=0.2", "Instead: --transforms mixup:VALUE"),
        ("model.frozen=true", "Instead: --train head"),
        ("train.epochs=3", "Did you mean budget.epochs?"),
        ("parallel.gpus=2", "Instead: --device cuda:1 takes that GPU"),
    ],
)
def test_a_key_of_another_trainer_has_an_answer(
    steady: Callable[..., Said], digits: Path, setting: str, part: str
) -> None:
    _refused(steady("train", digits, *QUICK, "--set", setting), 2, f"unknown key {setting.partition('=')[0]!r}", part)


def test_a_typo_in_a_key(steady: Callable[..., Said], digits: Path) -> None:
    _refused(steady("train", digits, *QUICK, "--set", "optim.nestrov=true"), 2, "optim.nestrov", "nesterov")
    _refused(steady("train", digits, *QUICK, "--set", "optim.lr"), 2, "KEY=VALUE")


def test_a_typo_in_a_uri(steady: Callable[..., Said], digits: Path) -> None:
    _refused(steady("train", "s3:/bucket/x.rec", *QUICK), 2, "is no URI of a store here")
    _refused(steady("train", digits, "--run", "s3//bucket/runs/a"), 2, "is no URI of a store here")
    _refused(steady("train", digits, "--val", "s3a://bucket/x.rec"), 2, "is no URI of a store here")


@pytest.mark.parametrize(
    ("flag", "value", "part"),
    [
        ("--lr", "-1", "above 0"),
        ("--epochs", "0", "above 0"),
        ("--batch-size", "0", "batch_size"),
        ("--size", "0", "4096"),
    ],
)
def test_a_value_that_cannot_be(steady: Callable[..., Said], digits: Path, flag: str, value: str, part: str) -> None:
    _refused(steady("train", digits, "--model", "digits", flag, value), 2, part)


def test_a_value_of_the_wrong_kind(steady: Callable[..., Said], digits: Path) -> None:
    _refused(steady("train", digits, "--epochs", "many"), 2, "many")
    _refused(steady("train", digits, "--batch-size", "32.5"), 2, "--batch-size is '32.5'; it must be a whole number")
    _refused(steady("feed", digits, "-j", "1.5"), 2, "-j is '1.5'; it must be a whole number")


def test_a_key_without_its_part(steady: Callable[..., Said], digits: Path) -> None:
    _refused(steady("train", digits, *QUICK, "--set", "lr=0.1"), 2, "Did you mean optim.lr?")


def test_after_a_first_mistake_the_mended_command_has_its_run_folder(steady: Callable[..., Said], digits: Path) -> None:
    words = ["train", digits, "--model", "digits", "--epochs", "1", "--batch-size", "32", "--run", "mine"]
    _refused(steady(*words, "--device", "cuda:7", "--lr", "0.2"), 2, "cuda:7")
    assert steady(*words, "--device", "cpu", "--lr", "0.1").code == 0


def test_weights_not_for_products_are_asked_for(steady: Callable[..., Said], digits: Path) -> None:
    words = ["finetune", digits, "--model", "timm/convnextv2_atto.fcmae_ft_in1k", "--epochs", "1"]
    _refused(steady(*words), 2, "non-commercial", "cc-by-nc-4.0", "--accept-licence")
    assert not Path("runs").exists()


def test_an_unknown_model(steady: Callable[..., Said], digits: Path) -> None:
    _refused(steady("train", digits, "--model", "resnet2O", "--epochs", "1"), 2, "resnet2O", "resnet20")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--model", "resnet2O"], "resnet20"),
        (["--lr", "-1"], "optim.lr is -1.0"),
        (["--set", "optim.nestrov=true"], "nesterov"),
        (["--val", "digit"], "--val is digit: there is no such file or folder. Did you mean digits?"),
        (["--weights", "none.pth"], "--weights is none.pth"),
    ],
)
def test_what_is_wrong_without_the_data_is_found_before_they_are_packed(
    steady: Callable[..., Said], write_digits: Callable[..., Path], tmp_path: Path, words: list[str], part: str
) -> None:
    output = steady("train", write_digits(tmp_path / "digits", 40, 2), *words)
    _refused(output, 2, part)
    assert "packing" not in output.error
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--epochs", "0"], "budget.epochs is 0.0"),
        (["--set", "optm.lr=1"], "Did you mean optim.lr?"),
        (["--optimizer", "lamp"], "optim.name is 'lamp'"),
        (["--optimizer", "lamb"], "optim.name is 'timm/lamb', which has no usual learning rate: choose one with --lr"),
        (["--device", "tpu"], "parallel.device is 'tpu'; it must be auto, cpu, mps, cuda or cuda:<number>"),
        (["--price", "x"], "no price of an instance 'x' is known"),
        (["--labels", "no.csv"], "--labels is no.csv: there is no such file"),
        (["--schedule", "cosin"], "Did you mean cosine?"),
    ],
)
def test_flags_are_checked_before_any_file_is_looked_at(
    steady: Callable[..., Said], tmp_path: Path, words: list[str], part: str
) -> None:
    (tmp_path / "photos").mkdir()  # nothing could be read in it
    for verb in ("train", "finetune"):
        output = steady(verb, tmp_path / "photos", *words)
        _refused(output, 2, part)
        assert "reading" not in output.error
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train a --lr 0,1", "--lr is '0,1'; it must be a number"),
        ("train a --batch-size 64MB", "--batch-size is '64MB'; it must be a whole number or auto"),
        ("train a --batch-size 1,024", "--batch-size is '1,024'; it must be a whole number or auto"),
        (
            "bench infer a --batch-size 1,4",
            "--batch-size is '1,4'; it must be a whole number, or several: --batch-size 1 4",
        ),
        ("train a --size 224x224", "--size is '224x224'; it must be a whole number"),
        ("train a --epochs ten", "--epochs is 'ten'; it must be a number"),
        ("serve a --port http", "--port is 'http'; it must be a whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_without_names_of_types(
    steady: Callable[..., Said], words: str, line: str
) -> None:
    _refused(steady(*words.split()), 2, line)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("train photos lr=0.1", ["flags begin with dashes: --lr 0.1"]),
        ("train photos epochs=3", ["--epochs 3"]),
        ("train photos lr=", ["it needs a value, and flags begin with dashes: --lr VALUE"]),
        ("train photos extra lr=0.1", ["flags begin with dashes: --lr 0.1"]),
        ("evaluate model=best.pt data=photos", ["steady evaluate --help shows all"]),
        ("train photos momentum=0.8", ["--momentum 0.8"]),
        ("train photos label=class", ["--label class"]),
        ("train data=photos model=resnet20", ["steady train photos --model resnet20"]),
        ("train model=resnet20 data=photos", ["steady train photos --model resnet20"]),
        ("train photos --grad-accum 2", ["--set optim.accumulate"]),
        ("predict run --source cat.jpg", ["steady predict RUN IMAGE"]),
        ("export run --format onnx", ["-o model.onnx"]),
        ("ls", ["steady report RUNS"]),
        ("compare a b", ["steady report RUN RUN --compare"]),
        ("tensorboard", ["steady watch RUN"]),
        ("delete run", ["rm -r RUN"]),
    ],
)
def test_words_of_other_tools_are_answered_with_ours(steady: Callable[..., Said], words: str, parts: list[str]) -> None:
    _refused(steady(*words.split()), 2, *parts)


@pytest.mark.parametrize(
    "words", ["--lr-base 0.2", "--lr0 0.2", "--seed-everything 3", "--batch 4", "--random-state 3"]
)
def test_words_that_are_exactly_ours_are_taken(steady: Callable[..., Said], words: str) -> None:
    _refused(steady("train", ".", *words.split(), "--epochs", "0"), 2, "budget.epochs is 0.0")


def test_numbers_of_a_list_need_no_brackets(steady: Callable[..., Said]) -> None:
    _refused(steady("train", ".", "--set", "data.mean=0.5,0.5"), 2, "data.mean is (0.5, 0.5)")
    _refused(steady("train", ".", "--set", "optim.betas=(0.9,2)"), 2, "optim.betas is (0.9, 2.0)")


def test_a_folder_of_runs_in_place_of_a_run_lists_them(steady: Callable[..., Said], digits: Path) -> None:
    assert steady("train", digits, *QUICK, "--run", "all/first").code == 0
    shutil.copytree("all/first", "all/second")
    for words in (
        ["evaluate", "all"],
        ["predict", "all", "x.jpg"],
        ["resume", "all"],
        ["export", "all", "-o", "x.onnx"],
    ):
        _refused(steady(*words), 2, "It holds 2 runs: ", "all/first", "all/second; name one")


def test_test_images_that_validate_are_not_offered_as_unseen(
    steady: Callable[..., Said], write_digits: Callable[..., Path], tmp_path: Path
) -> None:
    for split in ("train", "test"):
        write_digits(tmp_path / "photos" / split, 40, 2)
    output = steady("train", "photos", *QUICK, "--run", "a")
    assert output.code == 0 and "  steady evaluate a\n" in output.error
    output = steady("train", "photos/train", "--val", "photos/test", *QUICK, "--run", "b")
    assert output.code == 0 and "  steady evaluate b\n" in output.error


def test_of_a_flag_given_twice_the_last_one_counts(steady: Callable[..., Said], digits: Path) -> None:
    _refused(steady("train", digits, "--lr", "-1", "--json", "--lr", "-2", "--json"), 2, "optim.lr is -2.0")


def test_an_argument_too_many(steady: Callable[..., Said]) -> None:
    _refused(steady("train", "my", "photos"), 2, "one argument too many: photos")


def test_a_factory_is_not_imported_because_a_recipe_names_it(steady: Callable[..., Said], digits: Path) -> None:
    Path("evil.py").write_text("open('imported', 'w')\n")
    Path("recipe.toml").write_text('[model]\nname = "evil:make"\n')
    _refused(steady("train", digits, "--recipe", "recipe.toml", "--epochs", "1"), 2, "evil:make", "--model")
    assert not Path("imported").exists()


def test_weights_of_another_model(steady: Callable[..., Said], digits: Path, tmp_path: Path) -> None:
    torch.save({"layer.weight": torch.zeros(3, 3)}, tmp_path / "other.pth")
    output = steady("finetune", digits, *QUICK, "--weights", tmp_path / "other.pth")
    _refused(output, 2, "other.pth", "layer.weight")


def test_weights_that_would_have_to_be_unpickled(steady: Callable[..., Said], digits: Path, tmp_path: Path) -> None:
    torch.save({"run": subprocess.Popen}, tmp_path / "evil.pth")
    _refused(steady("finetune", digits, *QUICK, "--weights", tmp_path / "evil.pth"), 2, "evil.pth")


def test_a_full_disk_keeps_what_was_done(steady: Callable[..., Said], digits: Path, small_disk: Path) -> None:
    run = small_disk / "run"
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (2 << 20 >> 1))
    output = steady("train", digits, *QUICK, "--run", run, "--set", "every.save_steps=1", "--set", "every.keep=99")
    _refused(output, 1, "the disk is full", "same command")
    filler.unlink()
    assert steady("train", digits, *QUICK, "--run", run).code == 0


def test_a_read_only_run_folder(steady: Callable[..., Said], digits: Path, read_only_disk: Path) -> None:
    _refused(steady("train", digits, *QUICK, "--run", read_only_disk / "run"), 1, "not writable", "another folder")


def test_a_run_in_use_by_another_process(steady: Callable[..., Said], digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", str(digits), *QUICK[:2], *QUICK[4:], "--epochs", "999", "--run", str(run)]
    child = start(main, words)
    try:
        deadline = time.monotonic() + 60
        while not (run / "events.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        output = steady(*words)
        _refused(output, 2, f"in use by process {child.pid}")
    finally:
        child.kill()
        child.join()


def test_a_changed_recipe_on_an_existing_run(steady: Callable[..., Said], digits: Path, tmp_path: Path) -> None:
    assert steady("train", digits, *QUICK, "--run", tmp_path / "run").code == 0
    output = steady("train", digits, *QUICK, "--lr", "0.3", "--run", tmp_path / "run")
    _refused(output, 2, "optim.lr: 0.1 -> 0.3", "--run")


def test_the_same_command_again_says_that_it_is_finished(steady: Callable[..., Said], digits: Path) -> None:
    assert steady("train", digits, *QUICK).code == 0
    output = steady("train", digits, *QUICK)
    assert output.code == 0
    assert "is finished" in output.error


def test_evaluating_other_classes(
    steady: Callable[..., Said], digits: Path, write_digits: Callable[..., Path], tmp_path: Path
) -> None:
    assert steady("train", digits, *QUICK, "--run", tmp_path / "run").code == 0
    folder = write_digits(tmp_path / "three", 40, 3)
    assert steady("evaluate", tmp_path / "run", folder).code == 0
    (folder / "2").rename(folder / "two")
    _refused(steady("evaluate", tmp_path / "run", folder), 2, "two")


def test_evaluating_a_run_that_has_not_finished_says_whose_weights_it_takes(
    steady: Callable[..., Said], digits: Path, tmp_path: Path
) -> None:
    assert steady("train", digits, *QUICK, "--run", tmp_path / "run").code == 0
    (tmp_path / "run" / "model.safetensors").unlink()
    output = steady("evaluate", tmp_path / "run")
    assert output.code == 0
    assert "has not finished: these are its best weights so far" in output.error
    assert "evaluating: done=" in output.error


def test_evaluating_what_is_no_run(steady: Callable[..., Said], tmp_path: Path) -> None:
    _refused(steady("evaluate", tmp_path), 2, "not a run")
    _refused(steady("evaluate", tmp_path / "nothing"), 2, "nothing of that name")


def test_predicting_what_cannot_be_read_goes_on_with_the_next(
    steady: Callable[..., Said], digits: Path, digits_folder: Path, tmp_path: Path
) -> None:
    assert steady("train", digits, *QUICK, "--run", tmp_path / "run").code == 0
    good = next(digits_folder.glob("3/*.png"))
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    output = steady("predict", tmp_path / "run", tmp_path / "bad.png", "gone.png", good)
    assert output.code == 1
    first, second, third = output.out.splitlines()
    assert first.startswith(f"{tmp_path / 'bad.png'}: ") and second.startswith("cannot read gone.png: ")
    assert "record" not in first + second
    assert third.startswith(str(good)) and third.count(" % ") == 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "name the data to train on"),
        (["nowhere"], "no file or folder nowhere"),
        ([".", "--val", "nowhere"], "--val is nowhere"),
    ],
)
def test_data_that_are_not_there_are_told_before_torch_is_imported(data: list[str], message: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "steadytrain", "train", *data, "--model", "timm/resnet18"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines() if "|" in line}
    assert process.returncode == 2 and message in process.stderr
    assert "steadytrain.cli.options" in imported and "torch" not in imported


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_too_little_address_space_to_load_torch_is_one_line_with_the_limit(digits: Path, tmp_path: Path) -> None:
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1_500_000_000,) * 2);"
    code += "from steadytrain.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "train", str(digits), *QUICK, "--run", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("steady: ")]
    assert "1.5 GB of address space (ulimit -v)" in line and "raise the limit" in line


def test_a_working_folder_that_is_gone_is_told(steady: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    output = steady("train", "a.rec")
    _refused(output, 2, "the folder that this command was started in is gone: change to one that is there")


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (
            OSError(errno.EMFILE, "Too many open files"),
            r"no further file can be opened: [\d,]+ files may be open at once",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "/proc/meminfo"),
            r"cannot read /proc/meminfo \(No such file\)",
        ),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            "torch is not installed here: pip install torch",
        ),
        (
            RuntimeError("operator torchvision::nms does not exist"),
            r"torchvision does not fit the torch that is installed \(operator torchvision::nms does not exist\):"
            " install both again",
        ),
    ],
)
def test_what_the_system_lacks_is_one_line(
    steady: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, fault: Exception, part: str
) -> None:
    def fail(words: object) -> None:
        raise fault

    monkeypatch.setattr("steadytrain.cli._run", fail)
    output = steady("doctor")
    assert output.code == 1
    assert len(output.lines) == 1 and re.match(f"steady: {part}", output.lines[0])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("pack", "steady pack needs SOURCE... OUT, such as: steady pack photos/ photos"),
        ("evaluate", "steady evaluate needs RUN, such as: steady evaluate runs/a"),
        ("export runs/a", "steady export needs --output, such as: steady export runs/a -o model.onnx"),
        ("train x --epochs", "--epochs needs a value: --epochs VALUE"),
        ("bench", "name the network to measure, such as steady bench resnet20"),
        ("bench frob --model mlp", "steady bench measures train, or infer, not 'frob'"),
        ("models --model mlp", "needs no flag"),
        ("resume nothing", "nothing does not exist"),
        ("sweep nothing --over lr=0.1,0.2", "there is no file or folder nothing"),
        ("sweep nothing", "nothing is to be swept: give --over KEY=VALUE,VALUE, or a table [sweep] in a recipe file"),
    ],
)
def test_what_is_left_out_is_asked_for_in_the_same_words_by_every_verb(
    steady: Callable[..., Said], words: str, part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    _refused(steady(*words.split()), 2, part)


def test_the_network_of_a_benchmark_stands_with_a_flag_or_without(
    monkeypatch: pytest.MonkeyPatch, steady: Callable[..., Said]
) -> None:
    asked: list[object] = []

    def measure(words: object, *_: object, **__: object) -> dict[str, str]:
        asked.append(words)
        raise InputError("enough")

    monkeypatch.setattr("steadytrain.cli.bench._bench_in_subprocess", measure)
    monkeypatch.setattr("steadytrain.export.speed.bench_inference", measure)
    _refused(steady("bench", "digits"), 2, "enough")
    _refused(steady("bench", "train", "--model", "digits"), 2, "enough")
    _refused(steady("bench", "infer", "digits", "mlp"), 2, "enough")
    _refused(steady("bench", "infer", "--model", "digits", "mlp"), 2, "enough")
    assert asked[0] == asked[1] and asked[2] == asked[3] == ("digits", "mlp")


@pytest.mark.parametrize(
    "words",
    ["train {}", "train . --labels {}", "evaluate {}", "predict a {}", "report {}", "check {}", "watch {}"],
)
def test_a_name_that_is_too_long_for_a_file_is_one_line(steady: Callable[..., Said], words: str) -> None:
    said = steady(*words.format("QUJD" * 1200).split())
    (line,) = said.lines
    assert said.code == 2 and len(line) < 300 and "Traceback" not in said.error


def test_a_rank_that_has_saved_keeps_its_code_though_it_is_asked_again_while_python_ends() -> None:
    """As srun does, once one of the ranks has ended."""
    code = (
        "import os, signal, sys, steadytrain.cli as cli; sys.argv = ['steady', 'train']; cli._code_of = lambda _: 75;"
        " code = cli.main(); os.kill(os.getpid(), signal.SIGTERM); sys.exit(code)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 75

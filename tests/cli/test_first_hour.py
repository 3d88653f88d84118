"""What newcomers typed in their first hour, as they typed it: the exit code, and how the first line begins."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from steadytrain import __version__
from steadytrain.cli import HELP_GROUPS, SHELLS, START, VERBS, join_verb, main, parse

RUNS_HINT = 'steady: Unknown command "{}". Instead: steady runs lists runs'
MISSING = "steady: Unknown option: {}. Instead: "

TYPED: list[tuple[str, int, str]] = [
    ("steady", 0, "Usage: steady COMMAND"),
    ("steady --help", 0, "Usage: steady COMMAND"),
    ("steady help", 0, "Usage: steady COMMAND"),
    ("steady --version", 0, __version__),
    ("steady --completion", 2, "steady: --completion takes the name of a shell: bash, zsh, fish"),
    ("steady ui", 2, 'steady: Unknown command "ui". '),
    ("steady init", 2, 'steady: Unknown command "init". '),
    (
        "steady yolo classify train model=a.pt data=photos",
        2,
        'steady: Unknown command "yolo". Instead: steady finetune photos',
    ),
    ("steady list", 2, RUNS_HINT.format("list")),
    ("steady ls", 2, RUNS_HINT.format("ls")),
    ("steady compare runs/a runs/b", 2, 'steady: Unknown command "compare". Instead: steady report RUN RUN --compare'),
    ("steady tensorboard", 2, 'steady: Unknown command "tensorboard". Instead: steady watch RUN'),
    ("steady delete runs/a", 2, 'steady: Unknown command "delete". Instead: steady runs --clean'),
    ("steady train", 2, "steady: name the data to train on: a folder of classes"),
    ("steady train nothing/", 2, "steady: there is no file or folder nothing/."),
    ("steady train photos --lr ten", 2, "steady: --lr is 'ten'; it must be a number"),
    ("steady train photos --lr 0,1", 2, "steady: --lr is '0,1'; it must be a number"),
    ("steady train photos --epochs 0", 2, "steady: budget.epochs is 0.0; it must be above 0"),
    ("steady train photos --size 224x224", 2, "steady: --size is '224x224'; it must be a whole number"),
    ("steady train photos --batch-size 64MB", 2, "steady: --batch-size is '64MB'; it must be a whole number or auto"),
    ("steady train photos --gpus 1", 2, "steady: --gpus is 1: --procs 1 computes on 1 GPU, "),
    ("steady train photos --set optim.batch_size=8", 2, "steady: unknown key 'optim.batch_size'. Did you mean batch_s"),
    ("steady train photos --set data.batch_size=8", 2, "steady: unknown key 'data.batch_size'. Did you mean batch_siz"),
    ("steady train photos --set optm.lr=1", 2, "steady: unknown key 'optm.lr' in the recipe. Did you mean optim.lr?"),
    ("steady train photos --optimizer lamp", 2, "steady: optim.name is 'lamp'; it must be one of sgd, nag, adam"),
    ("steady train photos lr=0.1", 2, "steady: one argument too many: lr=0.1: flags begin with dashes: --lr 0.1"),
    ("steady train photos --split 0.8", 2, MISSING.format("--split") + "--holdout 0.2"),
    ("steady train photos --fresh", 2, MISSING.format("--fresh") + "another --run FOLDER"),
    ("steady train photos --force", 2, MISSING.format("--force") + "another --run FOLDER"),
    ("steady train photos -o out", 2, MISSING.format("-o") + "--run FOLDER"),
    ("steady train photos --model resnet5O", 2, "steady: there is no model 'resnet5O'. Did you mean resnet"),
    ("steady train photos --model efficientnet", 2, "steady: there is no model 'efficientnet'. Did you mean"),
    ("steady train photos --model yolo11n-cls.pt", 2, "steady: there is no model 'yolo11n-cls.pt'. A file of weights"),
    ("steady train photos --model resnet20 --device cuda", 2, "steady: parallel.device is 'cuda' but torch "),
    ("steady finetune photos --weights nothing.pth", 2, "steady: --weights is nothing.pth: there is no such file"),
    ("steady predict photos", 2, "steady: photos holds images, and no model was named: steady predict RUN photos"),
    ("steady predict cat.png", 2, "steady: cat.png holds images, and no model was named: steady predict RUN cat.png"),
    ("steady predict", 2, "steady: steady predict needs RUN, such as: steady predict runs/a cat.jpg"),
    ("steady evaluate", 2, "steady: steady evaluate needs RUN, such as: steady evaluate runs/a"),
    ("steady export runs/a", 2, "steady: steady export needs --output"),
    ("steady serve", 2, "steady: steady serve needs "),
    ("steady resume", 2, "steady: steady resume needs RUN, such as: steady resume runs/a"),
    ("steady resume nothing", 2, "steady: nothing does not exist"),
    ("steady report", 2, "steady: no run named: steady report RUN..., or a folder of runs"),
    ("steady diagnose", 2, "steady: no run named: steady diagnose runs/a"),
    ("steady runs", 2, "steady: there is no folder runs here: name the folder of your runs"),
    ("steady check", 2, "steady: steady check needs PATH, such as: steady check photos-train.rec"),
    ("steady lr_find photos", 2, 'steady: Unknown command "lr_find". Instead: steady schedule --find-lr photos'),
    ("steady leaderboard", 2, RUNS_HINT.format("leaderboard")),
    ("steady summary runs/a", 2, 'steady: Unknown command "summary". Instead: steady report RUN'),
    ("steady val data=photos", 2, 'steady: Unknown command "val". Instead: steady evaluate photos'),
    ("steady finetune --data photos", 2, MISSING.format("--data") + "the data come first: steady finetune DATA"),
    (
        "steady finetune photos --time-limit 600",
        2,
        MISSING.format("--time-limit") + "steady finetune DATA --budget-min",
    ),
    (
        "steady finetune photos --weights imagenet",
        2,
        "steady: --weights is imagenet: there is no such file or folder. ",
    ),
    ("steady finetune photos photos", 2, "steady: one argument too many: photos: one source is trained on; --val phot"),
    ("steady predict source=photos", 2, "steady: source=photos has no dashes: files and folders are named without a "),
    ("steady predict runs/a photos --output a.csv", 2, MISSING.format("--output") + "steady predict RUN IMAGE --csv"),
    ("steady serve runs/a photos", 2, "steady: one argument too many: photos: steady serve takes photos alone"),
    (
        "steady export runs/a model.onnx",
        2,
        "steady: steady export needs --output, such as: steady export runs/a -o mod",
    ),
    ("steady train photos --cpu --epochs 0", 2, "steady: budget.epochs is 0.0"),
    ("steady help noisy_neighbour", 0, "`noisy_neighbour`: other processes take the cores"),
]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with twelve photographs of two classes, and one beside them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    noise = np.random.default_rng(0)
    for number in range(12):
        path = Path("photos", ("cat", "dog")[number % 2], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 255, (24, 24, 3), dtype=np.uint8)).save(path)
    Path("photos/cat/0.png").rename("cat.png")


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize(("line", "code", "begin"), TYPED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_newcomers_type_is_answered(line: str, code: int, begin: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, before any data are read, and without a run that failed left behind."""
    assert main(shlex.split(line)[1:]) == code
    said = capsys.readouterr()
    text = said.err if code else said.out
    assert text.startswith(begin), text[:300]
    assert not Path("runs").exists()
    if code:
        assert text.count("\n") == 1


def test_help_lists_every_verb_once_after_a_start_whose_commands_are_understood(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(verb for verbs in HELP_GROUPS.values() for verb in verbs) == sorted(VERBS)
    for line in START:
        words = ["1" if word == "PID" else word for word in shlex.split(line)[1:]]
        assert parse(join_verb(words)) is not None
    monkeypatch.setenv("COLUMNS", "80")
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("Start here:") < lines.index("Train:") and max(map(len, lines)) <= 80
    [completion] = [line for line in lines if "--completion" in line]
    assert completion.split()[0] == "--completion" and all(shell in completion for shell in SHELLS)


def test_a_long_list_of_models_goes_through_the_pager_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from steadytrain.cli.console import print_pages

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    paged: list[str] = []
    monkeypatch.setattr("pydoc.pager", paged.append)
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LESS", "FRX")  # or the pager sets it
    for stream, count, pages in ((Terminal(), 100, 1), (Terminal(), 10, 0), (io.StringIO(), 100, 0)):
        monkeypatch.setattr("sys.stdout", stream)
        paged.clear()
        print_pages("\n".join(["model"] * count))
        assert len(paged) == pages and bool(stream.getvalue()) == (not pages)

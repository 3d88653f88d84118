"""Command lines of MXNet's tools, as they stand in public scripts and articles, mean what they meant."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.interop.mxnet.cases import Case, Graph

from steadytrain.cli import main, parse
from steadytrain.cli.train import recipe_for
from steadytrain.config import Recipe
from steadytrain.config.defaults import usual_recipe
from steadytrain.config.plain import leaves
from steadytrain.config.timeline import Timeline
from steadytrain.errors import InputError
from steadytrain.events import Evaluated
from steadytrain.interop.mxnet.launchers import translate as translate_launcher
from steadytrain.interop.mxnet.params import write_params
from steadytrain.interop.mxnet.symbol import Symbol, write_symbol
from steadytrain.interop.mxnet.tools import translate
from steadytrain.run import Run

OLD = (Path(__file__).parent.parent / "golden" / "mxnet-commands.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize(("old", "new"), list(zip(OLD[::2], OLD[1::2], strict=True)))
def test_an_old_command_line_means_what_it_meant(old: str, new: str) -> None:
    program, *words = shlex.split(old)
    [command] = translate(program, words).commands
    for expected in re.findall(r"--\S+ [^\s-]\S*|\S+", new):
        assert expected in " ".join(command), f"{expected} in {command}"
    assert parse([*command])  # its flags are ours


def test_a_mean_is_left_out_with_the_network_that_it_belongs_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that stand in for MXNet's were trained on images scaled otherwise."""
    monkeypatch.chdir(tmp_path)
    tune = "--data-train a.rec --rgb-mean 0,0,0 --pretrained-model imagenet1k-resnet-50"
    for program, old in (
        ("score", "--model imagenet1k-resnet-50 --data-val b.rec --rgb-mean 0,0,0"),
        ("fine-tune", tune),
    ):
        read = translate(program, old.split())
        assert "mean" not in " ".join(read.commands[0])
        assert dict(read.rows)["--rgb-mean 0,0,0"].startswith("left out: it belongs to MXNet's network")
    (tmp_path / "imagenet1k-resnet-50-symbol.json").touch()
    assert "data.mean=[0,0,0]" in translate("fine-tune", tune.split()).commands[0]


@pytest.mark.parametrize(
    ("words", "old", "answer"),
    [
        ("--gpus 0,1,2 --batch-size 100", "--batch-size 100", "99 divide among 3 GPUs, 100 do not"),
        ("--gpus 0,1 --data-nthreads 32", "--data-nthreads 32", "--threads 16: of each of the 2 ranks"),
        ("--lr-step-epochs pow2 --lr-factor 1", "--lr-step-epochs pow2", "with --lr-factor 1 the rate never falls"),
        ("--random-resized-crop 1", "--random-resized-crop 1", "whole images, as MXNet's areas of 1 mean"),
        ("--min-random-scale 0.5", "--min-random-scale 0.5", "left out: images are not made smaller"),
        ("--min-crop-size 9", "--min-crop-size 9", "MXNet's sides are pixels of images as they are stored"),
        ("--data-val b.rec --image-shape 3,96,96", "--image-shape 3,96,96", "MXNet cut it out of images as they"),
    ],
)
def test_difference_in_the_meaning_of_a_flag_is_reported(words: str, old: str, answer: str) -> None:
    assert answer in dict(translate("train_imagenet", ["--data-train", "a.rec", *words.split()]).rows)[old]


@pytest.mark.parametrize(
    ("script", "words", "is_cut"),
    [
        ("train_mnist", "", False),
        ("train_cifar10", "", True),
        ("train_cifar10", "--image-shape 3,32,32", False),
    ],
)
def test_only_cifars_images_were_cut_by_mxnet(script: str, words: str, is_cut: bool) -> None:
    rows = translate(script, ["--data-train", "a.rec", *words.split()]).rows
    [answer] = [new for old, new in rows if old.startswith("--image-shape")]
    assert ("28 of 32" in answer) == is_cut


@pytest.mark.parametrize("words", ["--add_stn", "--add-stn 1", "--add_stn --num-epochs 3"])
def test_a_switch_of_train_mnist_needs_no_value(words: str) -> None:
    rows = dict(translate("train_mnist", ["--data-train", "a.rec", *words.split()]).rows)
    assert "a spatial transformer has no counterpart here" in rows.values()


LAW: dict[str, Any] = {
    "data.interpolation": "bilinear",
    "data.grow_size": [],
    "data.transforms": [],
    "data.balance": "none",
    "data.repeats": 1,
    "data.order": "global",
    "model.train": "full",
    "model.freeze": [],
    "model.batch_norm": "train",
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-8,
    "optim.warmup": "linear",
    "optim.final": 0.0,
    "optim.loss": "auto",
    "optim.class_weights": "none",
    "optim.label_smoothing": 0.0,
    "optim.clip_norm": None,
    "optim.ema": None,
    "optim.swa": None,
    "optim.accumulate": 1,
    "optim.grow_batch": [],
    "budget.patience": None,
    "budget.minutes": None,
    "parallel.engine": "ddp",
    "parallel.shard": False,
    "parallel.compress": "none",
}
"""What MXNet's and GluonCV's training scripts do whatever their flags: the law, by the keys of the recipe."""
SAID = {
    "data.holdout": r"no --(data|rec)-val\b",
    "data.val": r"no --(data|rec)-val\b",
    **dict.fromkeys(("data.augment", "data.area", "data.ratio", "data.pad"), r"no (augmentation flags|.*random-crop)"),
    "data.flip": "no (augmentation flags|.*random-mirror)",
    "data.mean": "--rgb-mean",
    "data.std": "--rgb-mean",
    "data.size": "--image-shape",
    "data.crop": "--image-shape",
}
"""Key of the recipe -> the row that tells of it, where a line leaves our value."""
NO_LAW = re.compile(
    "every\\.|budget\\.fill|parallel\\.|precision\\.|seed$|data\\.(train|test|classes|root|labels?|path|split|group)|model\\.(weights|options|folds)"
)
"""How a run is watched and shared out, and where its data lie: not what is learned."""


def _our_defaults(program: str, words: list[str], *, small: bool) -> list[str]:
    """Walk the recipe of an old line: keys that hold our value, are no law of the tool's, and are in no row."""
    read = translate(program, words)
    [command] = read.commands
    command = command[command.index("--") + 1 :] if command[0] == "launch" else command
    options, is_tuned = parse(command)["options"], command[0] == "finetune"
    recipe = options.recipe_over(usual_recipe("data", finetune=is_tuned, small=small))
    said = [old for old, _ in read.rows]
    ours = []
    for key, value in leaves(recipe.to_dict()):
        is_unused = {
            "optim.momentum": recipe.optim.name not in ("sgd", "nag"),
            "optim.nesterov": recipe.optim.name != "sgd",
            "optim.milestones": recipe.optim.schedule != "mxnet/multi-factor",
            "optim.factor": recipe.optim.schedule != "mxnet/multi-factor",
            "optim.power": recipe.optim.schedule != "mxnet/poly",
            "optim.options": True,
            "data.zip_names": True,  # how names are read, where data are a zip
            **dict.fromkeys(
                ("data.val", "data.holdout"), recipe.data.val is not None or {"--data_dir", "--data-dir"} & {*words}
            ),
            "model.decay": recipe.model.train == "full",
            "model.pretrained": value is is_tuned,
            **dict.fromkeys(("data.area", "data.ratio"), recipe.data.augment in ("none", "pad-crop")),
            "data.pad": recipe.data.augment in ("none", "resized-crop"),
        }.get(key, False)
        if key in LAW:
            ours += [key] if key not in options.changes and value != LAW[key] else []
        elif key not in options.changes and not is_unused and not NO_LAW.match(key):
            ours += [] if any(re.match(SAID.get(key, "$"), old) for old in said) else [key]
    return ours


LINES = [line for line in OLD[::2] if re.match(r"(train_|fine|launch|dmlc|mpirun|horovodrun|resnet50|image_)", line)]
LINES = [line for line in LINES if not re.search(r"--benchmark|--test-io|measure\.py|dist\.py|dist_train", line)]


@pytest.mark.parametrize(
    "line",
    [
        *LINES,
        "train_imagenet.py --network resnet --num-layers 50 --optimizer adam --random-crop 1 --data-train a.rec",
        "train_imagenet.py --network resnet --num-layers 50 --random-mirror 1 --brightness 0.4 --data-train a.rec",
        "fine-tune.py --pretrained-model imagenet1k-resnet-50 --data-train a.rec --random-resized-crop 1",
    ],
)
def test_no_translated_line_inherits_a_default_of_ours_unsaid(line: str) -> None:
    program, *words = shlex.split(line)
    is_tuned = program.startswith("fine")
    for small in (False,) if is_tuned else (False, True):
        assert _our_defaults(program, words, small=small) == []


def test_rates_of_optimizers_are_mxnets_where_torch_has_others() -> None:
    for name, option in (("rmsprop", "alpha=0.9"), ("adagrad", "eps=1e-07"), ("adadelta", "eps=1e-05")):
        read = translate("train_imagenet", ["--data-train", "a.rec", "--optimizer", name])
        assert f"optim.options.{option}" in read.commands[0]
        assert any(option in new for _, new in read.rows)


def _pretrained(folder: Path, data: NDArray[np.uint8]) -> None:
    """Write a small network ``net`` for 32 pixels, whose classifier has two outputs, as MXNet would."""
    g = Graph(0)
    x = g.op(
        "Convolution", g.var("data"), g.p("conv_weight", 16, 3, 3, 3), no_bias=True, num_filter=16, kernel="(3, 3)"
    )
    norm = [g.p(f"bn_{name}", 16, aux=name.startswith("moving"), positive=True) for name in NORM]
    x = g.op("Activation", g.op("BatchNorm", x, *norm, fix_gamma=False), act_type="relu")
    pool = g.op("Pooling", x, global_pool=True, kernel="(1, 1)", pool_type="avg")
    fc = g.op("FullyConnected", pool, g.p("fc_weight", 2, 16), g.p("fc_bias", 2), num_hidden=2)
    end = g.op("SoftmaxOutput", fc, g.var("softmax_label"))
    write_symbol(folder / "net-symbol.json", Symbol(tuple(g.nodes), (end,), 10901))
    case = Case(Symbol(tuple(g.nodes), (end,), 10901), g.params, data, g.aux)
    write_params(folder / "net-0003.params", case.prefixed)


NORM = ("gamma", "beta", "moving_mean", "moving_var")


def test_fine_tune_trains_as_mxnets_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new classifier, norms in training, one rate, no smoothing and no average; the recipe is shown before."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for i in range(120):
        image = random.integers(0, 120, (32, 32, 3), dtype=np.uint8)
        image[..., i % 2] += 100  # reddish, greenish
        path = tmp_path / "data" / "train" / ("red", "green")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    _pretrained(tmp_path, image)
    line = "--pretrained-model net --load-epoch 3 --data-train data/train --batch-size 12 --num-epochs 3 --lr 0.05"
    words = ["mxnet", "fine-tune.py", *line.split(), "--image-shape", "3,32,32", "--disp-batches", "1"]
    assert main([*words, "--dry-run", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    [command], rows = document["commands"], {row["old"]: row["new"] for row in document["rows"]}
    assert rows["--layer-before-fullc flatten0 (default)"].endswith("stands there; this network has no flatten0")
    assert "fits the classifier first" in rows["instead"] and "steady finetune data/train" in rows["instead"]
    recipe: Recipe = recipe_for("data/train", parse(command)["options"], finetune=True)
    (tmp_path / "old.toml").write_text(document["recipes"][0])
    again = recipe_for(None, parse(["train", "--recipe", "old.toml"])["options"], finetune=False)
    assert again.with_({"optim.base_batch_size": None}) == recipe
    model, optim = recipe.model, recipe.optim
    assert (model.train, model.batch_norm, optim.label_smoothing, optim.ema) == ("full", "train", 0.0, None)
    assert main([*words, "--model-prefix", "run"]) == 0
    losses = [event.loss for event in Run.open("run").events() if isinstance(event, Evaluated)]
    assert len(losses) == 3 and max(losses) < 0.6 and all(map(math.isfinite, losses))


TYPED = {
    "train_imagenet": """--network resnet --num-layers 50 --data-train a.rec --data-train-idx a.idx --data-val b.rec
        --data-val-idx b.idx
        --initializer xavier --monitor 10 --save-period 5 --top-k 5 --loss ce --num-classes 10 --num-examples 100
        --fill-value 127 --pca-noise 0.1 --warmup-epochs 5 --profile-worker-suffix x --gc-threshold 0.5
        --kv-store dist_async --random-crop 1 --brightness 0.4 --max-random-h 36 --mom 0.8 --random-resized-crop 0
        --test-io 0""",
    "fine-tune": """--data-train a.rec --pretrained-model imagenet1k-resnet-50 --network resnet --num-layers 50
        --load-epoch 0 --layer-before-fullc flatten0""",
    "train_mnist": "--data-train a.rec --rgb-mean 0,0,0 --add_stn 1",
}


@pytest.mark.parametrize("script", TYPED)
def test_every_flag_of_the_trainers_is_answered(script: str) -> None:
    """All that somebody types stands in the rows, or in an error that names it."""
    old = TYPED[script].split()
    shown = " ".join(f"{row[0]} " for row in translate(script, old).rows)
    flags = [word.replace("_", "-") for word in old if word.startswith("--")]
    assert [flag for flag in flags if f"{flag} " not in shown] == []


def test_a_launcher_tells_the_workers_in_any_spelling() -> None:
    for number in ("-n 4", "-n4", "--num-workers 4", "--num-workers=4"):
        words = f"{number} -H hosts python train_cifar10.py --num-layers 20 --optimizer lbsgd --macrobatch-size 1024"
        for store, batch, scale in (("dist_sync", 512, 2), ("device", 128, 8)):
            command = " ".join(translate("launch", [*words.split(), "--kv-store", store]).commands[0])
            assert f"--batch-size {batch} " in command and f"batch_scale={scale} " in command


def _launched(line: str) -> tuple[str, ...]:
    command = translate("launch", shlex.split(line)).commands[0]
    return command[command.index("--") + 1 :]


@pytest.mark.parametrize(
    "program",
    [
        *("./run.sh train_mnist.py", "bash run.sh", "prog --kv-store dist_async", '"cd /x && python train_mnist.py"'),
        "bash -c 'cd /x && python train_mnist.py'",
    ],
)
def test_a_launched_program_that_is_no_python_goes_to_a_shell_as_a_whole(program: str) -> None:
    python, c, code, words = _launched(f"-n 2 --launcher local {program}")
    assert (python, c, words) == ("python", "-c", program.strip('"').removeprefix("bash -c '").strip("'"))
    assert "execvp('sh'" in code


@pytest.mark.parametrize(
    ("program", "ours"),
    [
        ('"python x.py --a 1"', ("python", "x.py", "--a", "1")),
        ('./bin/python3.8 x.py --a "b c"', ("python", "x.py", "--a", "b c")),
        ('bash -c "python x.py --a 1"', ("python", "x.py", "--a", "1")),
        ("./x.py --a", ("python", "./x.py", "--a")),
        ("taskset -c 0 python -u x.py", ("python", "-u", "x.py")),
    ],
)
def test_an_own_program_is_started_by_python(program: str, ours: tuple[str, ...]) -> None:
    assert _launched(f"-n 2 -s 1 --launcher local {program}") == ours
    rows = translate("launch", shlex.split(f"-n 2 -s 1 --launcher local {program}")).rows
    assert rows[-1][1].startswith("your own program, which gets RANK and WORLD_SIZE; without MXNet's kvstore")


def test_a_line_may_begin_with_its_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = translate("train_cifar10.py", ["--num-layers", "20"])
    for before in ("python", "/usr/bin/python3 -u", "nohup python"):
        line = [*before.split(), "image-classification/train_cifar10.py", "--num-layers", "20"]
        assert translate(line[0], line[1:]).commands == plain.commands
    assert translate("/bin/bash", ["-c", "python train_cifar10.py --num-layers 20"]).commands == plain.commands
    read = translate("CUDA_VISIBLE_DEVICES=1", ["python", "launch.py", "-n", "2", "python", "x.py"])
    assert read.rows[0] == ("CUDA_VISIBLE_DEVICES=1", "belongs before steady mxnet")
    assert read.commands[0] == ("launch", "-n", "2", "--", "python", "x.py")
    (tmp_path / "mine.py").write_text("import mxnet\nkv = mxnet.kv.create('dist_sync')\n")
    with pytest.raises(InputError, match="own-mxnet-script"):
        translate("python", ["mine.py"])
    with pytest.raises(InputError, match="steady bench infer does what it did"):
        translate("python", ["benchmark_score.py", "--network", "resnet-50"])
    with pytest.raises(InputError, match="no tool of MXNet's is called 'python'"):
        translate("python", ["yours.py"])


def test_a_shell_that_a_launcher_starts_has_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text('echo "$1 $RANK of $WORLD_SIZE" > out$RANK\n')
    assert main(["mxnet", "launch.py", "-n", "2", "--launcher", "local", "sh", "run.sh", "rank"]) == 0
    assert [(tmp_path / f"out{rank}").read_text() for rank in (0, 1)] == ["rank 0 of 2\n", "rank 1 of 2\n"]


def test_a_program_of_mxnets_kvstore_is_refused_with_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import mxnet as mx\n\nkv = mx.kvstore.create('dist_sync')\n")
    (tmp_path / "jobs.sh").write_text("python train_mnist.py --kv-store dist_sync\n")
    (tmp_path / "records.py").write_text("from mxnet import recordio\nimport torch\n")
    (tmp_path / "torch.py").write_text("import torch  # no kvstore as in mxnet\n")
    for program in ("python mine.py", "bash jobs.sh"):
        assert main(["mxnet", "launch.py", "-n", "2", "--launcher", "local", *program.split(), "--dry-run"]) == 2
        said = capsys.readouterr().err
        assert "trains through MXNet's kvstore or Horovod, which are not here" in said and "own-mxnet-script" in said
    for script in ("records.py", "torch.py"):
        assert _launched(f"-n 2 --launcher local python {script}") == ("python", script)


def test_machines_in_a_line_of_mpi_belong_into_a_file() -> None:
    with pytest.raises(InputError, match="NAME slots=N of a file: --hostfile FILE"):
        translate("mpirun", ["-np", "8", "-H", "server1:4,server2:4", "python", "train.py"])
    read = translate("mpirun", ["-np", "4", "-H", "localhost:4", "-bind-to", "none", "python", "x.py"])
    assert read.commands[0] == ("launch", "-n", "4", "--", "python", "x.py")


def test_every_flag_of_gluons_scripts_is_answered() -> None:
    for line in (
        "train_horovod.py --use-rec --data-nthreads 2 --rec-train a.rec --rec-val b.rec --batch-size 8 --lr 0.1"
        " --warmup-lr 0.01 --last-gamma --no-wd --model resnet50_v1 --no-cuda --eval-frequency 1 --save-frequency 2"
        " --resume-epoch 1 --auto_aug --mixup --mixup-alpha 0.1 --mixup-off-epoch 3",
        "image_classification.py --dataset cifar10 --model resnet18_v1 -j 2 --gpus 0 --epochs 3 --seed 5 --wd 0"
        " --prefix p --mode hybrid --use_thumbnail --start-epoch 0 --resume x --lr-factor 0.5 --profile",
        "train_cifar10.py --num-gpus 1 --model cifar_resnet20_v1 --drop-rate 0.1 --save-period 3 --save-plot-dir x"
        " --resume-from y --lr-decay-period 5",
    ):
        program, *words = line.split()
        shown = " ".join(f"{old} " for old, _ in translate(program, words).rows).replace("_", "-")
        flags = [word.replace("_", "-") for word in words if word.startswith("--") and word != "--data-nthreads"]
        assert [flag for flag in flags if f"{flag} " not in shown] == []


def test_data_that_mxnet_downloaded_are_fetched_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for script, name in (("train_mnist", "mnist"), ("train_cifar10", "cifar10")):
        row = dict(translate(script, []).rows)["no --data-train"]
        assert row == f"steady fetch {name} fetches it: --data-train {name}/{name}-train.rec"
    (tmp_path / "data").mkdir()
    assert "no --data-train" not in dict(translate("train_mnist", []).rows)


def test_what_stands_for_weights_of_the_zoo_is_described() -> None:
    for name, words in (
        ("imagenet11k-resnet-152", "a ResNet-101 v2 of ImageNet-21k and then ImageNet-1k"),
        ("imagenet1k-inception-bn", "made for 299 pixels"),
    ):
        rows = dict(translate("fine-tune", ["--data-train", "a.rec", "--pretrained-model", name]).rows)
        assert words in rows[f"--pretrained-model {name}"]


def test_workers_without_a_distributed_store_become_one_training_with_a_notice() -> None:
    """MXNet's launcher started as many trainings that knew nothing of each other."""
    words = ["-n", "4", "-H", "hosts", "python", "train_cifar10.py", "--num-layers", "20", "--kv-store"]
    alone = translate("launch", [*words, "device"]).rows
    assert dict(alone)["4 workers, --kv-store device"].startswith("one training, whose ranks share each batch; MXNet's")
    assert not [old for old, _ in translate("launch", [*words, "dist_sync"]).rows if old.startswith("4 workers")]


ASYNC = "-n 4 -s 2 -H hosts python train_cifar10.py --num-layers 20 --batch-size 32 --kv-store dist_async"


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_dist_async_is_the_asynchronous_engine() -> None:
    """Each worker's batch is an update of its own, so it is not multiplied; one server does for all workers."""
    [command] = translate("launch", ASYNC.split()).commands
    options = parse(command[command.index("--") + 1 :])["options"]
    assert (options.flags["engine"], options.flags["batch_size"]) == ("async", 32)
    started = translate_launcher(command[1:])
    assert started.argv[: started.argv.index("--")] == ("--hosts", "hosts", "--set", "ranks=4")
    assert any("--engine async has one server" in line for line in started.notes)


def test_dist_async_is_synchronous_with_a_notice_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    translation = translate("launch", ASYNC.split())
    assert "--batch-size 128 " in " ".join(translation.commands[0]) and "async" not in translation.commands[0]
    values = dict(translation.rows)["--kv-store dist_async"]
    assert values.startswith("synchronous") and "pip install 'steadytrain[async]'" in values


def test_dist_async_with_one_worker_is_plain_training() -> None:
    translation = translate("train_cifar10", ["--num-layers", "20", "--kv-store", "dist_async"])
    assert "async" not in translation.commands[0] and "one worker" in dict(translation.rows)["--kv-store dist_async"]


@pytest.mark.parametrize(
    ("launcher", "started"),
    [
        ("-n 4 -H hosts", "launch -H hosts -n 8 -- train"),
        ("--launcher slurm -n 4", "launch --launcher slurm --procs 2 -n 4 -- train"),
        ("-n 1", "launch -n 2 -- train"),
    ],
)
def test_worker_with_several_gpus_becomes_a_rank_on_each(launcher: str, started: str) -> None:
    words = f"{launcher} python train_cifar10.py --num-layers 20 --kv-store dist_sync --gpus 0,2 --batch-size 32"
    command = " ".join(translate("launch", words.split()).commands[0])
    workers = 1 if launcher == "-n 1" else 4
    assert command.startswith(started) and f"--batch-size {32 * workers} " in command
    assert "--device cuda:0,2 " in command and "--procs" not in command.partition(" -- ")[2]


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (
            "train_imagenet --data-train a.rec --network resnet --num-layer 51",
            "of resnet there are 18, 34, 50, 101, 152",
        ),
        ("train_cifar10 --num-layers 164", "for 28 pixels it is 6n + 2 below 164, such as 20"),
        ("train_cifar10 --num-layers 51", "for 28 pixels it is 6n + 2 below 164"),
        ("train_imagenet --data-train hdfs://x/a.rec", "hdfs:// is not read: copy it to a disk"),
        ("image_classification.py --model vgg11 --dataset dummy", "steady bench train --model timm/vgg11"),
        ("kill-mxnet.py hosts python", "steady launch (Ctrl-C ends its ranks) does what it did"),
        ("make_list.py a b", "steady pack FOLDER OUT does what it did"),
        ("test_score.py", "steady evaluate MODEL DATA does what it did"),
        ("train_imagenet --data-train a.rec --netwrok resnet", "unrecognized arguments: --netwrok resnet"),
        ("train_imagenet --data-train a.rec;b.rec", "steady pack a.rec b.rec merged"),
        ("train_imagenet --data-train a.rec --kv-store dist_synch", "Did you mean dist_sync"),
        ("train_imagenet --network resnet", "name the data: --data-train FILE.rec"),
        ("train_imagenet --data-train a.rec --image-shape 3,224,256", "trained on as squares"),
        ("train_imagenet --data-train a.rec --optimizer adamw", "--optimizer is 'adamw'; MXNet has"),
        (
            "train_imagenet --data-train a.rec --load-epoch 3 --model-prefix p",
            "neither a run in p nor a file p-0003.params",
        ),
        ("fine-tune --data-train a.rec --pretrained-model imagenet1k-resnet-51", "Did you mean imagenet1k-resnet-50"),
        ("im2rec photos images/", "there is no list photos*.lst: write it first (steady mxnet im2rec --list"),
        ("im2rec a.lst images/ a.rec nsplit=4 part=1", "steady pack a.lst a --root images/ --shards 4 writes all"),
        ("train_imagnet --data-train a.rec", "Did you mean train_imagenet"),
        ("train_imagenet --data-train a.rec --lr-step-epochs powx", "must be epochs, such as 30,60, or pow2"),
        ("fine-tune --data-train a.rec --benchmark 1", "measures a network by its name"),
        ("score --model p,last --data-val b.rec", "the epoch after the comma must be a number"),
        ("train_mnist --gpus 0,0", "--gpus is '0,0'; it must be numbers of GPUs, each once, such as 0,2"),
        ("bandwidth --gpus 0", "a single GPU has nothing to exchange"),
        (
            "launch -n 2 python train_mnist.py --gpus 0 --kv-store dist_sync",
            "2 workers on this machine would share the GPUs of --gpus",
        ),
        ("train_imagenet --data-train a.rec --load-epoch 3", "--model-prefix names a run's folder, or a prefix"),
        ("benchmark_score.py --network resnet-50", "the flags of benchmark_score.py are not read: steady bench infer"),
        (
            "train_imagenet.py --rec-train a.rec --model resnet50_v1d --teacher resnet152_v1d",
            "--teacher: no distillation is built in",
        ),
        ("train_imagenet.py --rec-train a.rec --model resnet51_v7", "--model is 'resnet51_v7', whose name here is not"),
        (
            "train_imagenet.py --rec-train a.rec --model resnet50_v1 --lr-mode stairs",
            "--lr-mode is 'stairs'; it must be step, cosine, poly or constant",
        ),
        (
            "train_imagenet.py --rec-train a.rec --model resnet50_v1 --num-gpus -1",
            "--num-gpus is -1; it must be at least 0",
        ),
        ("benchmark.py --worker_count 2", "the flags of benchmark.py are not read: steady scale --model NAME"),
        ("launch -n four python train_mnist.py", "launch: argument -n/--num-workers/--nworker: invalid int value"),
    ],
)
def test_arguments_that_mxnets_tools_refuse_are_one_line_errors(old: str, message: str) -> None:
    program, *words = old.split(" ")
    with pytest.raises(InputError, match=re.escape(message)):
        translate(program, words)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder ``photos`` of ten images in the current one: six of cats, four of dogs, one folder deeper."""
    monkeypatch.chdir(tmp_path)
    for i in range(10):
        path = tmp_path / "photos" / ("cat" if i < 6 else "pets/dog") / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (20 * i, 90, 10)).save(path)
    return tmp_path


def test_a_list_named_as_a_prefix_is_packed_alone(photos: Path) -> None:
    (photos / "a_train.lst").write_text("0\t0\tcat/0.jpg\n7\t1\tpets/dog/7.jpg\n3\t0\tcat/3.jpg\n")
    (photos / "a_val.lst").write_text("6\t1\tpets/dog/6.jpg\n")
    assert main(["mxnet", "im2rec.py", "a_train.lst", "photos", "--num-thread", "1"]) == 0
    card = json.loads((photos / "a_train.json").read_text())
    assert (card["num_images"], card["classes"], card["counts"]) == (3, ["cat", "dog"], [2, 1])
    assert [line.split("\t")[0] for line in (photos / "a_train.idx").read_text().splitlines()] == ["0", "7", "3"]
    assert not list(photos.glob("a_val.rec")) and not list(photos.glob("*.lst.*"))


LISTING = ["--list", "--recursive", "--train-ratio", "0.4", "--test-ratio", "0.4"]


def test_all_lists_of_a_prefix_are_packed_each_into_its_file(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mxnet", "im2rec.py", "photos", "photos", *LISTING]) == 0
    assert capsys.readouterr().out.splitlines() == ["cat 0", "pets/dog 1"]
    (photos / "photos_val.lst").write_text("0\t0\tcat/0.jpg\n9\t1\tpets/dog/9.jpg\n")  # as edited by hand
    for _ in range(2):  # the second time replaces them
        assert main(["mxnet", "im2rec.py", "photos", "photos", "--pass-through", "--force"]) == 0
    sizes = {path.stem: json.loads(path.read_text())["num_images"] for path in photos.glob("*.json")}
    assert sizes == {"photos_train": 4, "photos_val": 2, "photos_test": 4}


LISTED = [4, 0, 5, 9, 3, 1, 6, 8, 7, 2]
"""The order in which MXNet 1.9.1's im2rec.py lists these images (``--list --recursive``)."""


def test_list_has_the_order_of_im2rec(photos: Path) -> None:
    assert main(["mxnet", "im2rec", "--list=True", "--recursive", "1", "photos", "photos"]) == 0
    lines = (photos / "photos.lst").read_text().splitlines()
    names = [f"cat/{i}.jpg" if i < 6 else f"pets/dog/{i}.jpg" for i in LISTED]
    assert lines == [f"{i}\t{i // 6}.000000\t{name}" for i, name in zip(LISTED, names, strict=True)]
    assert main(["mxnet", "im2rec", "--list", "--no-shuffle", "--chunks", "3", "photos", "photos/cat"]) == 0
    assert (photos / "photos_2.lst").read_text() == "4\t0.000000\t4.jpg\n5\t0.000000\t5.jpg\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--list photos photos", "--recursive goes into its folders"),
        ("--list --recursive --train-ratio 0.9 --test-ratio 0.2 photos photos", "must lie from 0 to 1 and come to 1"),
        ("--list --recursive photos elsewhere", "there is no folder elsewhere"),
    ],
)
def test_a_list_that_cannot_be_is_refused(
    words: str, message: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mxnet", "im2rec", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_several_labels_are_stored_with_a_notice(photos: Path) -> None:
    (photos / "several.lst").write_text("0\t0\t1\tcat/0.jpg\n7\t1\t0\tpets/dog/7.jpg\n")
    assert "all 2 labels" in dict(translate("im2rec", ["several", "photos"]).rows)["several.lst"]


def test_a_later_epoch_goes_on_at_the_rate_that_the_schedule_had(tmp_path: Path) -> None:
    (tmp_path / "p-0040.params").touch()
    words = f"--data-train a.rec --model-prefix {tmp_path / 'p'} --load-epoch 40 --lr-step-epochs 30,60".split()
    command = " ".join(translate("train_imagenet", words).commands[0])
    assert f"--weights {tmp_path / 'p-0040.params'} --epochs 40" in command
    assert "--lr 0.01" in command and "optim.milestones=[20]" in command


def test_the_recipe_of_a_dry_run_is_the_one_that_is_trained(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rec = str(shutil.copy(data_folder / "mxnet-rec" / "im2rec" / "cifar120.rec", tmp_path / "a.rec"))
    words = (
        f"train_cifar10.py --data-train {rec} --data-val {rec} --num-layers 20 --batch-size 10 --num-epochs 5".split()
    )
    assert main(["mxnet", *words, "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    [command] = document["commands"]
    recipe: Recipe = recipe_for(rec, parse(command)["options"], finetune=False)
    (tmp_path / "old.toml").write_text(document["recipes"][0])
    again = parse(["train", "--recipe", str(tmp_path / "old.toml")])["options"]
    same = recipe_for(None, again, finetune=False)
    assert Timeline(same, 0).peak == 0.05 and same.with_({"optim.base_batch_size": None}) == recipe
    assert (recipe.model.name, recipe.batch_size, recipe.optim.momentum, recipe.optim.nesterov) == (
        "resnet20",
        10,
        0.9,
        False,
    )


def test_a_training_writes_the_log_that_parse_log_reads(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rec = data_folder / "mxnet-rec" / "im2rec" / "cifar120.rec"
    words = (
        f"train_mnist.py --network mlp --data-train {rec} --batch-size 20 --num-epochs 2 --disp-batches 3 --mxnet-log"
    )
    code = main(["mxnet", *words.split(), "--model-prefix", str(tmp_path / "run")])
    lines = (errors := capfd.readouterr().err).splitlines()
    assert code == 0, errors
    speeds = [
        m
        for line in lines
        if (m := re.match(r".*Epoch\[(\d+)\] Batch \[\d+-(\d+)\]\tSpeed: ([.\d]+) samples/sec\taccuracy=", line))
    ]
    assert {m[1] for m in speeds} == {"0", "1"}
    for pattern in (r".*Epoch\[(\d+)\] Train-accuracy.*=([.\d]+)", r".*Epoch\[(\d+)\] Validation-accuracy.*=([.\d]+)"):
        matches = [re.match(pattern, line) for line in lines]
        assert [match[1] for match in matches if match] == ["0", "1"]


def test_an_index_is_as_rec2idx_writes_it(data_folder: Path, tmp_path: Path) -> None:
    rec = data_folder / "mxnet-rec" / "im2rec" / "cifar120.rec"
    assert main(["mxnet", "rec2idx.py", str(rec), str(tmp_path / "a.idx")]) == 0
    offsets = [line.split("\t")[1] for line in rec.with_suffix(".idx").read_text().splitlines()]
    assert (tmp_path / "a.idx").read_text() == "".join(f"{i}\t{at}\n" for i, at in enumerate(offsets))

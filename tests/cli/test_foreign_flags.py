"""Every flag of timm, torchvision, Lightning and MXNet means the same here, or one line says what to type instead."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from steadytrain.cli import VERBS, app, join_verb, parse
from steadytrain.cli.foreign_flags import read_flags
from steadytrain.cli.options import TrainingOptions
from steadytrain.config import Recipe, schedules
from steadytrain.config.defaults import usual_recipe
from steadytrain.config.foreign import foreign_flags, foreign_table, plain_word
from steadytrain.config.laws import law_names
from steadytrain.config.recipe import recipe_settings
from steadytrain.errors import InputError


def recipe(text: str) -> Recipe:
    options: TrainingOptions = parse(["train", "photos", *text.split()]).get("options", TrainingOptions())
    return options.recipe_over(usual_recipe("photos", finetune=False, small=False))


def test_every_flag_of_each_tool_is_taken_or_answered_in_one_line() -> None:
    page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate_cli.py"))
    for tool in page["TOOLS"]:
        answers = [page["answer"](typed) for typed in page["flags_of"](tool)]
        for one in answers:
            is_taken = bool(one.ours or one.notes or plain_word(one.typed.split()[0]) in foreign_flags())
            says_what = re.search("--|steady|Not supported yet: .{4}|docs: |has no counterpart", one.refusal)
            assert bool(says_what) if one.refusal else is_taken, f"{tool}: {one}"
            assert "\n" not in one.refusal and len(one.refusal) < 200
        assert sum(not one.refusal for one in answers) > len(answers) / 2, tool


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--opt lamb --lr 0.005", {"optim.name": "timm/lamb"}),
        ("--optimizer torch.optim.AdamW", {"optim.name": "adamw"}),
        ("--opt sgd_nesterov", {"optim.name": "nag"}),
        ("--sched multistep --decay-milestones 30 60 --dr 0.2", {"optim.schedule": "step", "optim.factor": 0.2}),
        ("--lr-scheduler steplr --lr-step-size 30 --lr-gamma 0.1", {"optim.schedule": "factor,every=30"}),
        ("--sched=step --decay-epochs=2.4", {"optim.schedule": "factor,every=2.4"}),
        ("--lr-warmup-epochs 5 --lr-warmup-method linear", {"optim.warmup_epochs": 5, "optim.warmup": "linear:0.01"}),
        ("--lr-base 0.1 --lr-base-size 512", {"optim.lr": 0.1, "optim.base_batch_size": 512}),
        ("--opt adamw --opt-betas 0.9 0.95 --opt-eps 1e-6", {"optim.betas": (0.9, 0.95), "optim.eps": 1e-6}),
        ("--model-ema --model-ema-decay 0.9999", {"optim.ema": 0.9999}),
        ("--model-ema", {"optim.ema": 0.9998}),
        ("--amp --amp-dtype float16", {"precision.name": "fp16"}),
        ("--amp-dtype bfloat16", {"precision.name": "bf16"}),
        ("--precision bf16-mixed", {"precision.name": "bf16"}),
        ("--trainer.precision=16-mixed", {"precision.name": "fp16"}),
        ("--dtype float32 --amp", {"precision.name": "fp32"}),
        ("--letterbox", {"data.fit": "pad"}),
        ("--rect True", {"data.fit": "pad"}),
        ("--bf16 True --tf32 True", {"precision.name": "bf16"}),
        ("--report_to wandb tensorboard", {"every.track": "wandb,tensorboard"}),
        ("--pad_to_aspect_ratio", {"data.fit": "pad"}),
        ("--crop_to_aspect_ratio False", {"data.fit": "squash"}),
        ("--crop-mode border", {"data.fit": "pad"}),
        ("--crop-mode center", {"data.fit": "crop"}),
        ("--resize-mode squash", {"data.fit": "squash"}),
        ("--resize-method=squish", {"data.fit": "squash"}),
        ("--rect False", {"data.fit": None}),
        ("--model-dtype bfloat16", {"precision.name": "pure-bf16"}),
        ("--torchcompile inductor", {"precision.compile": "default"}),
        ("--torchcompile-mode max-autotune", {"precision.compile": "max-autotune"}),
        ("--devices 2 --accelerator gpu --strategy ddp", {"parallel.procs": 2, "parallel.device": "cuda"}),
        ("--devices 0,2 --accelerator gpu", {"parallel.device": "cuda:0,2", "parallel.procs": None}),
        ("--devices -1", {"parallel.procs": "auto"}),
        ("--gpus 0,1 --kv-store device", {"parallel.device": "cuda:0,1"}),
        ("--gpus all", {"parallel.procs": "auto", "parallel.device": "cuda"}),
        ("--devices auto", {"parallel.procs": "auto"}),
        ("--accelerator gpu --devices all", {"parallel.procs": "auto", "parallel.device": "cuda"}),
        ("--pretrained False", {"model.pretrained": False}),
        ("--strategy fsdp", {"parallel.shard": True}),
        ("--deterministic true", {"parallel.deterministic": True}),
        ("--trainer.deterministic false", {"parallel.deterministic": False}),
        ("--train-crop-size 176 --val-crop-size 224", {"data.grow_size": ("176@0",), "data.size": 224}),
        ("--input-size 3 192 192", {"data.size": 192}),
        ("--mean 0.5 0.5 0.5 --std 0.5", {"data.mean": (0.5, 0.5, 0.5), "data.std": (0.5,)}),
        ("--rgb-mean 127.5,127.5,127.5", {"data.mean": (0.5, 0.5, 0.5)}),
        ("--no-aug", {"data.augment": "none", "data.flip": False}),
        ("--layer-decay 0.7", {"model.train": "discriminative", "model.decay": 0.7}),
        ("--pretrained", {"model.pretrained": True}),
        ("--pretrained-path a.pth", {"model.weights": "a.pth"}),
        ("--drop 0.2 --drop-path 0.1", {"model.options": {"drop_rate": 0.2, "drop_path_rate": 0.1}}),
        ("--model-kwargs a=1 b=max --epochs 3", {"model.options": {"a": 1, "b": "max"}, "budget.epochs": 3}),
        ("--sync-bn", {"model.batch_norm": "synchronous"}),
        ("--sync_batchnorm false", {"model.batch_norm": "train"}),
        ("--bce-loss", {"optim.loss": "binary"}),
        ("--max_time 01:00:30:00", {"budget.minutes": 1470}),
        ("--val_check_interval 0.5", {"every.evaluate_epochs": 0.5}),
        ("--recovery-interval 500", {"every.save_steps": 500}),
        ("--recovery-interval 0", {"every.save_steps": None}),
        ("--data.batch_size 64 --model.lr 0.01", {"batch_size": 64, "optim.lr": 0.01}),
        ("--val-split 0.2", {"data.holdout": 0.2}),
        ("--gc-type 2bit --gc-threshold 0.25", {"parallel.compress": "bf16"}),
        ("--pin-mem --no-prefetcher --epochs 3", {"budget.epochs": 3}),
        ("--num_train_epochs 3 --max_grad_norm 1 --no_cuda", {"budget.epochs": 3, "optim.clip_norm": 1}),
        ("--label_smoothing_factor 0.2 --lr_scheduler_type linear", {"optim.label_smoothing": 0.2}),
        ("--valid_pct 0.3 --n_epochs 4", {"data.holdout": 0.3, "budget.epochs": 4}),
        ("--image_size 180 180 --shuffle --verbose --epochs 3", {"data.size": 180, "budget.epochs": 3}),
        ("--target_size 224,224 --class_mode categorical", {"data.size": 224}),
        ("--cos_lr --close_mosaic 10 --cache ram", {"optim.schedule": "cosine"}),
        ("--device 0", {"parallel.device": "cuda:0"}),
        ("--device 0,2", {"parallel.device": "cuda:0,2"}),
        ("--loss sparse_categorical_crossentropy", {"optim.loss": "cross-entropy"}),
        ("--loss nn.BCEWithLogitsLoss --torch_compile", {"optim.loss": "binary", "precision.compile": "default"}),
        ("--native-amp --fp16 --eval_strategy epoch --report_to none", {"precision.name": "fp16"}),
        ("--bf16 True --fp16 False --use_cpu", {"precision.name": "bf16", "parallel.device": "cpu"}),
        ("--report_to wandb", {"every.track": "wandb"}),
        ("--log-wandb --nc 5 --optimizer auto --val True", {"every.track": "wandb", "data.val": None}),
        ("--erasing 0.4", {"data.transforms": ("erase:0.4",)}),
        ("-aa rand-m9 -vb 64", {"data.transforms": ("randaugment:2,27,0,0.5",)}),
        ("--sched step --decay-epochs 2.4 --decay-rate .973", {"optim.factor": 0.973}),
        ("--opt momentum", {"optim.name": "sgd", "optim.nesterov": False}),
        ("--lr0 0.01 --optimizer SGD --batch 16", {"optim.lr": 0.01, "optim.base_batch_size": None}),
        ("--opt adamw --opt-betas .9 .99 --opt-eps 1.e-7", {"optim.betas": (0.9, 0.99), "optim.eps": 1e-7}),
        ("--multiprocessing-distributed --rank 0 --dist-eval --lr 0.3", {"optim.lr": 0.3}),
    ],
)
def test_a_flag_and_its_values_mean_the_same(text: str, expected: dict[str, object]) -> None:
    made = recipe(text)
    for key, value in expected.items():
        part, _, name = key.rpartition(".")
        assert getattr(getattr(made, part) if part else made, name) == value, key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--num_nodes 2", "steady launch --on ssh"),
        ("--strategy deepspeed", "parallel.shard=true"),
        ("--accelerator tpu", "--device cpu or cuda"),
        ("--input-size 3 224 192", "images are squares here"),
        ("--weights ResNet50_Weights.DEFAULT", "timm has many of torchvision"),
        ("--image-size 180 160", "images are squares here"),
        ("--val-split validation", "--val DATA names the validation data"),
        ("--gpus 2", "--procs 2"),
        ("--gpus 0", "--device cpu for none"),
        ("--devices both", "--procs 2 computes on two GPUs"),
        ("--max_time 12h", "DD:HH:MM:SS"),
        ("--val_check_interval 100", "evaluates four times an epoch"),
        ("--mean a", "it must be numbers"),
        ("--opt-betas", "--opt-betas needs a value"),
        ("--clip-mode agc", "clips the global norm"),
        ("--lr-k-decay 2", "--schedule poly"),
        ("--norm-weight-decay 0.1", "norms and biases are exempt"),
        ("-aa rand-m9.9.9", "the part 'm9.9.9' of 'rand-m9.9.9' has no counterpart here"),
        ("--lr-scheduler exponentiallr --lr-gamma 0.9", "--schedule exponential,factor=0.9"),
    ],
)
def test_a_value_without_a_counterpart_names_the_nearest(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_flags(["photos", *text.split()])


def test_all_flags_to_change_are_named_at_once() -> None:
    words = "--lr 0.5 --val-resize-size 232 --jsd --train-interpolation random --data-dir photos"
    with pytest.raises(InputError) as caught:
        read_flags(["finetune", "photos", *words.split()])
    message = str(caught.value)
    assert message.startswith("4 flags are not taken as they are: (1) --train-interpolation random has no counterpart")
    assert "(2) --val-resize-size: --set data.crop=0.875" in message and "(3) --jsd: Not supported yet" in message
    assert "(4) --data-dir: the data come first: steady finetune DATA" in message and "--lr" not in message


def test_the_factor_of_a_schedule_is_shown() -> None:
    optim = recipe("--lr-step-size 2 --lr-gamma 0.973").optim
    assert schedules.words(optim, 0.1).endswith("x 0.973 every 2 epochs")


def test_what_is_not_needed_is_taken_with_the_reason() -> None:
    words, notes = read_flags(["photos", "--pin-mem", "--benchmark", "true", "--num-classes", "10", "--lr", "0.1"])
    assert words == ["photos", "--lr", "0.1"]
    assert len(notes) == 3 and all("is not needed: " in line for line in notes)


def test_what_is_said_outright_counts_after_what_is_usual() -> None:
    words, notes = read_flags(["train", "photos", "--sched", "cosine", "--decay-epochs", "30"])
    assert words == ["train", "--schedule", "factor,every=30", "photos", "--schedule", "cosine"]
    assert notes == [] and parse(words)["options"].changes["optim.schedule"] == "cosine"


def test_the_table_does_not_hide_flags_of_ours() -> None:
    ours = {name.lstrip("-") for argument in app()["train"].assemble_argument_collection() for name in argument.names}
    for name in ours & foreign_flags().keys():  # it is about some values alone
        assert all(row.values for row in foreign_flags()[name]), name
    assert foreign_table()["values"].keys() <= ours


PLACES = {
    "DATA": "photos", "RUNS": "runs", "RUN": "runs/a", "FILE.toml": "a.toml", "FILE": "a.csv", "FOLDER": "out",
    "NAME": "resnet18", "IMAGE": "a.jpg", "HOSTS": "hosts", "CARD.json": "card.json", "GAMMA": "2", "VALUE": "0.5",
}  # fmt: skip


def _commands(sentence: str) -> Iterator[list[str]]:
    """Yield the command lines of a sentence, with flags alone behind ``steady train DATA``; {places} have a value."""
    for code in re.findall(r"`([^`]+)`", sentence):
        words = [re.sub("|".join(PLACES), lambda match: PLACES[match[0]], word) for word in shlex.split(code)]
        yield words if words[0] == "steady" else ["steady", "train", "photos", *words]


def _sentences() -> Iterator[str]:
    table = foreign_table()
    for section in ("notes", "needless", "only", "instead", "absent", "elsewhere", "verbs-instead"):
        yield from (table[section].values() if section == "notes" else table[section])


def _parse(words: Sequence[str]) -> None:
    """Parse a command of ours; that a recipe's values can be is a part of it."""
    verb, *left = join_verb(words[1:])
    if verb == "--version" or not left or "--help-recipe" in left:  # a verb alone, and what is no command
        assert verb == "--version" or verb in VERBS
        return
    if len(left) == 2 and left[-1].startswith("--"):  # a flag is named without its value
        assert left[-1] in {name for argument in app()[verb].assemble_argument_collection() for name in argument.names}
        return
    options = parse([verb, *left]).get("options", TrainingOptions())
    if verb in ("train", "finetune") and options.recipe is None:
        options.recipe_over(usual_recipe("photos", finetune=verb == "finetune", small=False))


@pytest.mark.parametrize("sentence", sorted(set(_sentences())))
def test_every_command_that_a_hint_names_is_one(sentence: str) -> None:
    for words in _commands(sentence):
        _parse(words)
    bare = re.sub(r"`[^`]*`|\([^)]*\)", "", sentence)
    assert not re.search(r"steady [a-z]|--[a-z]", bare.replace("--mixup-mode elem", "")), "no backticks"


def test_every_flag_of_the_table_is_read_as_one_of_ours() -> None:
    table = foreign_table()
    texts = [re.sub(r"\{\w+\}", "1", text) for text in (*table["ours"], *table["usual"]) if text[0] != "{"]
    texts += [f"--{flag} {value}" for flag, values in table["values"].items() for value in values]
    for text in texts:
        options = parse(["train", "photos", *text.split()])["options"]
        for key in (setting.partition("=")[0] for setting in options.set):
            assert key in recipe_settings() or key.rpartition(".")[0] in ("model.options", "optim.options"), text
    assert table["values"]["schedule"].keys() <= {*law_names()}


def test_verbs_of_others_are_verbs_of_ours() -> None:
    table = foreign_table()
    assert {ours.partition(" --")[0] for ours in table["verbs"]} <= VERBS.keys() and table["elsewhere"]
    theirs = [word for words in (*table["verbs"].values(), *table["verbs-instead"].values()) for word in words.split()]
    assert len(set(theirs)) == len(theirs) and not {*theirs} & VERBS.keys()

"""Every flag of timm, torchvision, Lightning and MXNet means the same here, or one line says what to type instead."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from steadytrain.cli import parse
from steadytrain.cli.foreign_flags import OTHER_VALUES, READERS, SWITCHES, read_flags
from steadytrain.cli.options import TrainingOptions
from steadytrain.config import Recipe
from steadytrain.config.defaults import usual_recipe
from steadytrain.errors import InputError


def recipe(text: str) -> Recipe:
    options: TrainingOptions = parse(["train", "photos", *text.split()]).get("options", TrainingOptions())
    return options.recipe_over(usual_recipe("photos", finetune=False, small=False))


def test_every_flag_of_each_tool_is_taken_or_answered_in_one_line() -> None:
    page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate_cli.py"))
    for tool in page["TOOLS"]:
        answers = [page["answer"](typed) for typed in page["flags_of"](tool)]
        for one in answers:
            is_taken = bool(one.ours or one.notes or one.typed.split()[0].lstrip("-").replace("_", "-") in READERS)
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
        ("--model-dtype bfloat16", {"precision.name": "pure-bf16"}),
        ("--torchcompile inductor", {"precision.compile": "default"}),
        ("--torchcompile-mode max-autotune", {"precision.compile": "max-autotune"}),
        ("--devices 2 --accelerator gpu --strategy ddp", {"parallel.procs": 2, "parallel.device": "cuda"}),
        ("--devices 0,2 --accelerator gpu", {"parallel.device": "cuda:0,2", "parallel.procs": None}),
        ("--devices -1", {"parallel.procs": "auto"}),
        ("--gpus 0,1 --kv-store device", {"parallel.device": "cuda:0,1"}),
        ("--gpus all", {"parallel.procs": "auto"}),
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
        ("--gc-type 2bit --gc-threshold 0.25", {"parallel.compress": "2bit", "parallel.threshold": 0.25}),
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
        ("--weights ResNet50_Weights.DEFAULT", "timm has many of them"),
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
    ],
)
def test_a_value_without_a_counterpart_names_the_nearest(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_flags(["photos", *text.split()])


def test_what_is_not_needed_is_taken_with_the_reason() -> None:
    words, notes = read_flags(["photos", "--pin-mem", "--benchmark", "true", "--num-classes", "10", "--lr", "0.1"])
    assert words == ["photos", "--lr", "0.1"]
    assert len(notes) == 3 and all("is not needed: " in line for line in notes)


def test_steps_of_another_schedule_are_left_out_with_a_word() -> None:
    words, notes = read_flags(["photos", "--sched", "cosine", "--decay-epochs", "30"])
    assert words == ["photos", "--sched", "cosine"]
    assert notes == ["--decay-epochs 30 is left out: it belongs to --sched step, not to --sched cosine"]


def test_readers_do_not_hide_flags_of_ours() -> None:
    from steadytrain.cli import app

    ours = {name.lstrip("-") for argument in app()["train"].assemble_argument_collection() for name in argument.names}
    assert not ours & (READERS.keys() | SWITCHES)
    assert READERS.keys() >= SWITCHES and not READERS.keys() & OTHER_VALUES.keys()

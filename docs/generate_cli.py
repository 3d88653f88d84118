"""Write docs/cli/VERB.md, docs/recipe.md and the page of other tools' flags: ``python docs/generate_cli.py``.

A test compares the pages with what this gives, so a changed flag without a changed page does not pass.
"""

from __future__ import annotations

import inspect
import re
import shlex
import types
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import App, Argument

from steadytrain.cli import RECIPE_VERBS, VERBS, app, default_text, examples, usage
from steadytrain.cli.foreign_flags import read_flags
from steadytrain.cli.options import TrainingOptions, help_of
from steadytrain.config.defaults import FEW_IMAGES, SMALL, usual_recipe
from steadytrain.config.foreign import advice
from steadytrain.config.reference import recipe_keys
from steadytrain.config.settings import GROUPS
from steadytrain.errors import InputError

FOLDER = Path(__file__).parent / "cli"
VALUES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}

TOOLS: dict[str, str] = {
    "timm's train.py": """
        --config a.yaml | --data-dir photos | --dataset torch/cifar10 | --train-split train | --val-split validation
        --train-num-samples 1000 | --val-num-samples 100 | --dataset-download | --class-map a.txt
        --input-img-mode RGB | --input-key jpg | --target-key cls | --dataset-trust-remote-code
        --model resnet50 | --pretrained | --pretrained-path a.pth | --initial-checkpoint a.pth | --resume last.pth.tar
        --no-resume-opt | --num-classes 10 | --gp avg | --img-size 224 | --in-chans 1 | --input-size 3 224 224
        --crop-pct 0.95 | --mean 0.5 0.5 0.5 | --std 0.5 0.5 0.5 | --interpolation bicubic | --batch-size 128
        --validation-batch-size 256 | --channels-last | --fuser nvfuser | --grad-accum-steps 4 | --grad-checkpointing
        --fast-norm | --model-kwargs drop_rate=0.1 | --head-init-scale 0.001 | --head-init-bias 0
        --torchcompile-mode max-autotune | --torchscript | --torchcompile inductor
        --device cuda | --amp | --amp-dtype bfloat16 | --model-dtype bfloat16 | --no-ddp-bb | --synchronize-step
        --local_rank 0 | --device-modules torch_xla
        --opt lamb --lr 0.005 | --opt-eps 1e-6 | --opt-betas 0.9 0.95 | --momentum 0.8 | --weight-decay 0.02
        --clip-grad 1 | --clip-mode norm | --layer-decay 0.75 | --layer-decay-min-scale 0 | --layer-decay-no-opt-scale 1
        --opt-kwargs foreach=false | --sched cosine | --sched-on-updates | --lr 0.5 | --lr-base 0.1 | --lr-base-size 256
        --lr-base-scale linear | --lr-noise 0.4 0.9 | --lr-noise-pct 0.67 | --lr-noise-std 1 | --lr-cycle-mul 2
        --lr-cycle-decay 0.5 | --lr-cycle-limit 3 | --lr-k-decay 1 | --warmup-lr 1e-5 | --min-lr 1e-5 | --epochs 300
        --epoch-repeats 3 | --start-epoch 0 | --sched multistep --decay-milestones 30 60
        --sched step --decay-epochs 30
        --warmup-epochs 5 | --warmup-prefix | --cooldown-epochs 10 | --patience-epochs 10 | --decay-rate 0.1
        --no-aug | --train-crop-mode rrc | --scale 0.2 1 | --ratio 0.75 1.33 | --hflip 0.5 | --vflip 0.5
        --color-jitter 0.4 | --color-jitter-prob 0.8 | --grayscale-prob 0.2 | --gaussian-blur-prob 0
        --aa rand-m9-mstd0.5-inc1 | --aug-repeats 3 | --aug-splits 3 | --jsd-loss | --bce-loss | --bce-sum
        --bce-target-thresh 0.2 | --bce-pos-weight 2 | --reprob 0.25 | --remode const | --recount 1 | --resplit
        --mixup 0.2 | --cutmix 1 | --cutmix-minmax 0.2 0.8 | --mixup-prob 0.5 | --mixup-switch-prob 0.5
        --mixup-mode elem | --mixup-off-epoch 250 | --smoothing 0.1 | --train-interpolation bicubic | --drop 0.2
        --drop-connect 0.2 | --drop-path 0.1 | --drop-block 0.1 | --bn-momentum 0.1 | --bn-eps 0.001 | --sync-bn
        --dist-bn reduce | --split-bn | --model-ema | --model-ema-force-cpu | --model-ema-decay 0.9998
        --model-ema-warmup | --seed 42 | --worker-seeding all | --log-interval 50 | --val-interval 2
        --recovery-interval 500 | --checkpoint-hist 10 | --workers 8 | --save-images | --pin-mem | --no-prefetcher
        --output out | --experiment a | --eval-metric top1 | --tta 3 | --use-multi-epochs-loader | --log-wandb
        --wandb-project a | --wandb-tags a | --wandb-resume-id a
        --train-img-sizes 128 224 | --train-batch-sizes 256 128 | --train-size-probs 0.5 0.5
        --train-size-schedule progressive | --train-size-schedule-spread 0.65 | --train-size-random-mix 0.1
        --train-batches-per-epoch 1000 | --variable-batch-loss-scale sqrt | --naflex-loader
        --naflex-train-seq-lens 128 256 | --naflex-max-seq-len 576 | --naflex-patch-sizes 8 16
        --naflex-patch-size-probs 0.5 0.5 | --naflex-loss-scale linear | --naflex-patchify-channels-first
        --kd-model-name resnet50 | --kd-distill-type logit | --kd-loss-type kl | --distill-loss-weight 0.5
        --task-loss-weight 0.5 | --kd-temperature 4 | --kd-student-feature-dim 512 | --kd-teacher-feature-dim 512
        --kd-token-distill-type soft""",
    "torchvision's train.py": """
        --data-path photos | --model resnet50 | --device cuda | --batch-size 32 | --epochs 90 | --workers 16 | --opt sgd
        --opt sgd_nesterov | --lr 0.1 | --momentum 0.8 | --wd 1e-4 | --norm-weight-decay 0 | --bias-weight-decay 0
        --transformer-embedding-decay 0 | --label-smoothing 0.1 | --mixup-alpha 0.2 | --cutmix-alpha 1
        --lr-scheduler cosineannealinglr | --lr-scheduler steplr --lr-step-size 30 | --lr-gamma 0.1 | --lr-min 0
        --lr-warmup-epochs 5 | --lr-warmup-method linear | --lr-warmup-decay 0.01 | --print-freq 10 | --output-dir out
        --resume checkpoint.pth | --start-epoch 0 | --cache-dataset | --sync-bn | --test-only
        --auto-augment ta_wide | --auto-augment ra --ra-magnitude 9 | --augmix-severity 3 | --random-erase 0.1 | --amp
        --world-size 8 | --dist-url env:// | --model-ema | --model-ema-steps 32 | --model-ema-decay 0.99998
        --use-deterministic-algorithms | --interpolation bilinear | --val-resize-size 232 | --val-crop-size 224
        --train-crop-size 176 | --clip-grad-norm 1 | --ra-sampler | --ra-reps 4
        --weights ResNet50_Weights.IMAGENET1K_V2 | --backend pil | --use-v2""",
    "Lightning's Trainer and LightningCLI": """
        --trainer.accelerator gpu | --strategy ddp | --strategy fsdp | --devices 2 | --devices 0,1 | --devices auto
        --num_nodes 2 | --precision bf16-mixed | --precision 16-mixed | --precision 32-true | --precision bf16-true
        --logger true | --callbacks EarlyStopping | --fast_dev_run true | --max_epochs 10 | --min_epochs 5
        --max_steps 1000 | --min_steps 100 | --max_time 00:12:00:00 | --limit_train_batches 0.1
        --limit_val_batches 0.1 | --limit_test_batches 0.1 | --limit_predict_batches 0.1 | --overfit_batches 1
        --val_check_interval 0.25 | --check_val_every_n_epoch 2 | --num_sanity_val_steps 2 | --log_every_n_steps 50
        --enable_checkpointing true | --enable_progress_bar false | --enable_model_summary false
        --accumulate_grad_batches 4 | --gradient_clip_val 1 | --gradient_clip_algorithm norm | --deterministic true
        --benchmark true | --inference_mode true | --use_distributed_sampler true | --profiler simple
        --detect_anomaly true | --barebones true | --plugins a | --sync_batchnorm true
        --reload_dataloaders_every_n_epochs 1 | --default_root_dir out | --enable_autolog_hparams true
        --model_registry a | --ckpt_path last | --weights_only true | --datamodule a | --train_dataloaders a
        --val_dataloaders a | --config a.yaml | --print_config | --seed_everything 42 | --model resnet50
        --data photos | --data.batch_size 64 | --optimizer AdamW | --model.lr 0.01
        --lr_scheduler CosineAnnealingLR""",
    "MXNet's train_imagenet.py and fine-tune.py": """
        --network resnet50 | --num-layers 50 | --gpus 0,1 | --kv-store device | --num-epochs 80 | --lr 0.1
        --lr-factor 0.1 | --lr-step-epochs 30,60 | --initializer default | --optimizer nag | --mom 0.8 | --wd 1e-4
        --batch-size 128 | --disp-batches 20 | --model-prefix a | --save-period 1 | --monitor 0 | --load-epoch 1
        --top-k 5 | --loss ce | --test-io 1 | --dtype float16 | --gc-type 2bit | --gc-threshold 0.5
        --macrobatch-size 0 | --warmup-epochs 5 | --warmup-strategy linear | --profile-worker-suffix a
        --profile-server-suffix a | --use-imagenet-data-augmentation 1 | --data-train train.rec | --data-val val.rec
        --data-train-idx train.idx | --data-val-idx val.idx | --rgb-mean 123.68,116.779,103.939 | --rgb-std 1,1,1
        --pad-size 4 | --fill-value 127 | --image-shape 3,224,224 | --num-classes 1000 | --num-examples 1281167
        --data-nthreads 4 | --benchmark 0 | --random-crop 0 | --random-mirror 1 | --random-resized-crop 1
        --max-random-h 0 | --max-random-s 0 | --max-random-l 0 | --min-random-aspect-ratio 0.75
        --max-random-aspect-ratio 1.33 | --max-random-rotate-angle 10 | --max-random-shear-ratio 0.1
        --max-random-scale 1 | --min-random-scale 1 | --max-random-area 1 | --min-random-area 0.08
        --max-crop-size -1 | --min-crop-size -1 | --brightness 0.4 | --contrast 0.4 | --saturation 0.4 | --pca-noise 0
        --pretrained-model a.params | --layer-before-fullc flatten0""",
    "Keras, fastai and Ultralytics": """
        --image_size 180 180 | --target_size 224 224 | --validation_split 0.2 | --class_mode categorical | --shuffle
        --batch_size 32 | --epochs 20 | --steps_per_epoch 100 | --learning_rate 0.001 | --optimizer adam
        --loss categorical_crossentropy | --metrics accuracy | --callbacks EarlyStopping | --monitor val_accuracy
        --verbose | --class_weight balanced | --valid_pct 0.2 | --bs 64 | --arch resnet34 | --n_epochs 5
        --base_lr 0.002 | --freeze_epochs 1 | --wd 0.01 | --item_tfms Resize | --batch_tfms aug_transforms
        --imgsz 224 | --lr0 0.01 | --cos_lr | --close_mosaic 10 | --cache ram | --patience 50 | --optimizer auto
        --dropout 0.1 | --freeze 10 | --project runs | --name exp | --exist_ok | --amp | --device 0 | --device 0,1
        --workers 8 | --seed 0 | --pretrained | --resume | --plots | --fraction 0.1""",
    "transformers' run_image_classification.py": """
        --train_dir photos | --model_name_or_path resnet50 | --do_train | --do_eval | --num_train_epochs 5
        --per_device_train_batch_size 8 | --gradient_accumulation_steps 4 | --learning_rate 2e-5 | --warmup_ratio 0.1
        --lr_scheduler_type cosine | --weight_decay 0.01 | --max_grad_norm 1 | --label_smoothing_factor 0.1 | --bf16
        --fp16 | --gradient_checkpointing | --dataloader_num_workers 4 | --logging_steps 10 | --eval_strategy epoch
        --save_strategy epoch | --report_to wandb | --output_dir out | --seed 42 | --torch_compile | --optim adamw_torch
        --ignore_mismatched_sizes | --resume_from_checkpoint a | --train_val_split 0.15 | --no_cuda
        --dataset_name beans | --validation_dir val | --label_column_name labels | --image_column_name image
        --remove_unused_columns false | --overwrite_output_dir | --push_to_hub | --push_to_hub_model_id a
        --per_device_eval_batch_size 8 | --logging_strategy steps | --load_best_model_at_end true
        --save_total_limit 3 | --metric_for_best_model accuracy | --max_train_samples 1000 | --warmup_steps 100
        --adam_beta1 0.9 | --adam_epsilon 1e-8 | --dataloader_drop_last true""",
}
"""Tool -> its flags, each with a value, between bars or at the ends of lines."""


def pages() -> dict[str, str]:
    """File name -> text, for every verb and the list of them."""
    index = ["# Commands", "", "| command | what it does |", "|---|---|"]
    index += [f"| [`steady {verb}`]({file_of(verb)}) | {summary} |" for verb, summary in VERBS.items()]
    codes = "0 done, 1 failed, 2 wrong use, 3 stalled, 75 stopped and saved, 130 interrupted"
    index += ["", f"Exit codes: {codes}.", ""]
    index += ["```{toctree}", ":hidden:", "", *(file_of(verb).removesuffix(".md") for verb in VERBS), "```", ""]
    return {"index.md": "\n".join(index), **{file_of(verb): page(verb, app()[verb]) for verb in VERBS}}


def file_of(verb: str) -> str:
    """The file name of a verb's page."""
    return f"{verb.replace(' ', '-')}.md"


def recipe_page() -> str:
    """The page of the recipe: every key, by part."""
    lines = [
        "# The recipe",
        "",
        "Look up every setting of a run, with its default. Set them by flags, by `--set KEY=VALUE`, in a file",
        "(`--recipe FILE`, .toml, .json or .yaml) or in Python (`st.Recipe`, `st.default_recipe`). Flags override the",
        "file, and `--set` overrides both. `steady train --help-recipe` prints the tables below, and",
        "`--help-recipe optim` one of them.",
        "Every run shows its settings in its first lines.",
        "",
        "A recipe file:",
        "",
        "```toml",
        "batch_size = 64",
        "",
        "[optim]",
        'name = "adamw"',
        "lr = 0.001",
        "",
        "[budget]",
        "epochs = 20",
        "```",
        "",
        f"`steady train` recommends `steady finetune` where classes average fewer than {FEW_IMAGES} images and",
        f"the images are larger than {SMALL} pixels. It does not where the user named a model or weights.",
    ]
    part = None
    for row in recipe_keys():
        name = row.key.rpartition(".")[0] or "top level"
        if name != part:
            lines += ["", f"## {name}", "", "| key | default | meaning, type, example |", "|---|---|---|"]
            part = name
        usual = row.train if row.train == row.finetune else f"train: {row.train}<br>finetune: {row.finetune}"
        lines.append(f"| `{row.key}` | {usual} | {row.meaning}<br>*{row.type}*<br>`{row.example}` |")
    return "\n".join([*lines, ""])


def flags_pages() -> dict[str, str]:
    """File name in docs/reference -> text, for the flags of every tool and the list of them."""
    lines = [
        "# Flags of other tools",
        "",
        "Type a flag of timm, torchvision, Lightning, MXNet, Keras, fastai, Ultralytics or transformers after",
        "`steady train DATA`, `finetune`, `sweep` or `schedule`. It works, or one line says what to type instead.",
        "Dashes and underscores are alike, and so are `--trainer.max_epochs` and `--max_epochs`. See also",
        "[their commands here](../help/other-tools.md).",
        "",
        "Two things differ without a note. `--lr` is for 256 images in `steady train` (128 of small ones), and scaled",
        "to the batch, as timm's `--lr-base` is; `--set optim.base_batch_size=none` turns that off. `--opt sgd` has",
        "Nesterov momentum in timm; here that is `--optimizer nag`.",
        "",
        "```{toctree}",
        *(f"flags/{file_of_tool(tool)}" for tool in TOOLS),
        "```",
        "",
    ]
    return {"flags-of-other-tools.md": "\n".join(lines)} | {
        f"flags/{file_of_tool(tool)}.md": tool_page(tool) for tool in TOOLS
    }


def file_of_tool(tool: str) -> str:
    """The file of a tool's page: ``lightning`` of ``Lightning's Trainer and LightningCLI``.

    >>> file_of_tool("timm's train.py"), file_of_tool("Keras, fastai and Ultralytics")
    ('timm', 'keras')
    """
    return re.split(r"\W", tool.lower())[0]


def tool_page(tool: str) -> str:
    """The page of a tool's flags: those that are the same in a line, and a table of what is made of the others."""
    answers = [answer(typed) for typed in flags_of(tool)]
    same = [each for each in answers if each.ours == each.typed and not each.notes]
    lines = [
        f"# {tool}",
        "",
        "Type them after `steady train DATA` as they are: [how they are read](../flags-of-other-tools.md).",
        "",
    ]
    lines += ["The same here: " + ", ".join(f"`{each.typed}`" for each in same) + ".", ""] if same else []
    lines += ["| their word | here | what differs |", "|---|---|---|"]
    for one in answers:
        if one in same:
            continue
        ours = f"`{one.ours}`" if one.ours else "taken"
        about = one.refusal or "; ".join(one.notes) or ("" if one.ours else "it says what is done anyway")
        about = about.removeprefix("Instead: ").removeprefix(f"{one.typed} is not needed: ")
        about = about.removeprefix(f"{one.typed} has no counterpart here: ").rstrip(".").replace("|", "\\|")
        lines.append(f"| `{one.typed}` | {'not taken' if one.refusal else ours} | {about} |")
    return "\n".join([*lines, ""])


@dataclass(frozen=True)
class FlagAnswer:
    """The answer of ``steady train`` to a flag of another tool.

    Args:
        typed: the flag with its value, and others that it needs.
        ours: the words in their place; the same words where they are ours too, none where nothing needs to be said.
        notes: what differs, or why nothing needs to be said.
        refusal: what the error says instead; empty where it is taken.
    """

    typed: str
    ours: str = ""
    notes: tuple[str, ...] = ()
    refusal: str = ""


def flags_of(tool: str) -> list[str]:
    """Return the flags of a tool, each with its value."""
    return [flag.strip() for line in TOOLS[tool].splitlines() for flag in line.split("|") if flag.strip()]


def answer(typed: str) -> FlagAnswer:
    """Return what ``steady train DATA`` makes of a flag."""
    try:
        ours, notes = read_flags(shlex.split(typed))
        flags = [word.replace("_", "-") for word in ours if word.startswith("--")]
        if unknown := [word for word in flags if word not in _names_of_train()]:
            return FlagAnswer(typed, refusal=advice(unknown[0]).strip())
        settings = tuple(value for flag, value in pairwise(ours) if flag == "--set")
        TrainingOptions(set=settings).recipe_over(usual_recipe("photos", finetune=False, small=False))
    except InputError as error:
        return FlagAnswer(typed, refusal=str(error))
    return FlagAnswer(typed, shlex.join(ours), tuple(notes))


@cache
def _names_of_train() -> frozenset[str]:
    """Return the names of the flags of ``steady train``."""
    return frozenset(name for argument in app()["train"].assemble_argument_collection() for name in argument.names)


def page(verb: str, command: App) -> str:
    """The page of one verb: what its function says, then its arguments and options."""
    function = command.default_command
    assert function is not None
    text, shown_examples = examples(inspect.getdoc(function) or VERBS[verb])
    default = app().default_parameter
    with help_of(verb) if verb in RECIPE_VERBS else nullcontext():
        arguments = command.assemble_argument_collection(default_parameter=default, parse_docstring=True)
    shown = [one for one in arguments if one.show]
    positional = [one for one in shown if not one.name.startswith("-")]
    options = [one for one in shown if one.name.startswith("-")]
    lines = [f"# steady {verb}", "", text, "", "```text", usage(verb, command), "```", ""]
    if positional:
        lines += ["| argument | meaning |", "|---|---|", *(_row(verb, one) for one in positional), ""]
    for name in ("", *GROUPS):
        rows = [_row(verb, one) for one in options if _group(one) == name]
        if rows:
            lines += [*([f"## {name}", ""] if name else []), "| option | meaning |", "|---|---|", *rows, ""]
    if shown_examples:
        mark = [] if verb == "help" else ["<!-- not run: examples, on files of yours -->"]
        lines += [*mark, "```sh", *shown_examples, "```", ""]
    return "\n".join(lines)


def _group(argument: Argument) -> str:
    """The heading that a flag stands under; empty for the verb's own flags, which come first."""
    return next((group.name for group in argument.parameter.group if group.name in GROUPS), "")


def _row(verb: str, argument: Argument) -> str:
    value = _value(argument.hint)
    names = ", ".join(f"`{name}`" for name in argument.names)
    value = f" {value}" if value and argument.name.startswith("-") else ""
    default = argument.field_info.default
    default = "" if default is inspect.Parameter.empty else default_text(default)
    ending = f" Default: `{default}`." if default else ""
    meaning = (argument.parameter.help or "").strip()
    return f"| {names}{value} | {meaning}{ending} |".replace("\n", " ")


def _value(hint: Any) -> str:
    """What stands for the value of an option: nothing for a switch, the choices where they are few."""
    origin, args = get_origin(hint), [one for one in get_args(hint) if one not in (types.NoneType, Ellipsis)]
    if hint is bool:
        return ""
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in args)
    if origin in (Union, types.UnionType, tuple, list):
        return " or ".join(dict.fromkeys(_value(one) for one in args if one is not bool))
    return VALUES.get(hint, getattr(hint, "__name__", str(hint)).upper())


def main() -> None:
    """Write every page, and remove those of verbs that are gone."""
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    (FOLDER.parent / "recipe.md").write_text(recipe_page(), encoding="utf-8")
    (FOLDER.parent / "reference" / "flags").mkdir(exist_ok=True)
    for name, text in flags_pages().items():
        (FOLDER.parent / "reference" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

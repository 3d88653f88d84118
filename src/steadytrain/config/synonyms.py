"""What users of timm, Lightning, Keras and MXNet ask for that is said otherwise here, or not there.

Words that are exactly a setting of the recipe stand at its field (:mod:`steadytrain.config.parts`). A word is looked up
without its dashes: ``--weight-decay``, ``weight_decay`` and ``optim.weight_decay`` are one.
"""

from __future__ import annotations

_DATA_FIRST = "the data to train on stand first: steady train DATA"
_FREEZE = (
    "--train head trains the classifier alone, --set model.freeze=conv_stem,blocks.0 freezes parts by name,"
    " --set model.batch_norm=frozen keeps the statistics"
)
_GPUS = "--device cuda:1 takes that GPU, --device cuda:0,2 these two, --procs auto all, steady launch other machines"
_PARTS = "--batch-size says the images of an update in all; --set optim.accumulate=4 computes them in four parts"
_RESUME = "the same command resumes its run, and so does steady resume RUN"
_RUN = "--run FOLDER says where all that a run writes lies"
_SIXTEEN = "--precision bf16, or fp16"
_AREA = "--set data.area=[0.08,1] and --set data.ratio=[0.75,1.33] say what random crops take"
_SCALING = "--set data.mean=[0.485,0.456,0.406] and --set data.std=[0.229,0.224,0.225], of values from 0 to 1"
_TRANSFORMS = "--transforms randaugment:2,9,erase:0.25,mixup:0.2 (docs: augmentation)"
_WHERE = "--schedule step --set optim.milestones=[30,60,80], in epochs; or --schedule factor,every=30"

OTHERWISE = {
    **dict.fromkeys(("amp", "amp-dtype", "fp16", "half", "mixed-precision", "bf16"), _SIXTEEN),
    **dict.fromkeys(("resume", "ckpt", "ckpt-path", "load-epoch", "no-resume-opt", "start-epoch"), _RESUME),
    **dict.fromkeys(("output", "output-dir", "out", "save-dir", "model-prefix", "logdir", "log-dir", "name"), _RUN),
    **dict.fromkeys(("experiment", "project", "default-root-dir"), _RUN),
    **dict.fromkeys(("freeze", "frozen", "unfreeze", "freeze-backbone", "freeze-layers", "freeze-bn"), _FREEZE),
    **dict.fromkeys(("stochastic-weight-averaging", "model-swa"), "--set optim.swa=0.75 averages the last quarter"),
    **dict.fromkeys(("early-stopping", "early-stop"), "--patience 3 ends a run after 3 evaluations without a gain"),
    **dict.fromkeys(("max-time", "time-limit", "time-budget"), "--set budget.minutes=60 ends a run by the clock"),
    **dict.fromkeys(("linear-probe", "linear-probing"), "--train probe, or --train probe+discriminative"),
    **dict.fromkeys(("gpus", "gpu", "devices", "accelerator", "strategy", "kv-store", "num-gpus", "world-size"), _GPUS),
    **dict.fromkeys(("grad-accum-steps", "accumulate-grad-batches", "accumulate", "gradient-accumulation"), _PARTS),
    **dict.fromkeys(("grad-accum", "accum-iter", "accum-steps", "gradient-accumulation-steps", "iter-size"), _PARTS),
    **dict.fromkeys(("per-device-train-batch-size", "batch-size-per-gpu"), _PARTS),
    **dict.fromkeys(("data-dir", "data-train", "train-dir", "dataset", "data", "train-split"), _DATA_FIRST),
    **dict.fromkeys(("mean", "std", "rgb-mean", "rgb-std", "normalize"), _SCALING),
    **dict.fromkeys(("decay-epochs", "decay-milestones", "milestones", "lr-step-epochs", "step-size"), _WHERE),
    **dict.fromkeys(("scale", "ratio", "area", "crop-area"), _AREA),
    **dict.fromkeys(("hflip", "flip"), "--set data.flip=true, or false"),
    **dict.fromkeys(("sync-bn", "syncbn", "sync-batchnorm"), "--set model.batch_norm=synchronous"),
    **dict.fromkeys(("drop-path", "drop-path-rate"), "--set model.options.drop_path_rate=0.1, where the model has it"),
    **dict.fromkeys(("drop", "drop-rate", "dropout"), "--set model.options.drop_rate=0.1, where the model has it"),
    **dict.fromkeys(("num-classes",), "the data say how many classes there are; --classes FILE names them"),
    **dict.fromkeys(("model-ema",), "--ema 0.999 keeps averaged weights"),
    **dict.fromkeys(("min-lr", "eta-min"), "--set optim.final=0.01 says the last rate as a share of the peak"),
    **dict.fromkeys(("input-size", "image-shape"), "--size 224 is the side of the square that the model sees"),
    **dict.fromkeys(("num-layers", "depth"), "it is part of the model's name (steady models)"),
    **dict.fromkeys(("channels-last", "memory-format"), "channels last is usual; --set precision.channels_last=false"),
    "bce-loss": "--loss binary",
    **dict.fromkeys(("balanced-sampling", "sampler", "weighted-sampler", "oversample"), "--balance classes"),
    "focal-loss": "--loss focal, or focal:GAMMA",
    "pretrained": "steady finetune starts from pretrained weights; for train, --set model.pretrained=true",
    **dict.fromkeys(
        ("mixup", "cutmix", "aa", "auto-augment", "randaugment", "rand-aug", "trivial-augment", "color-jitter", "mix"),
        _TRANSFORMS,
    ),
    **dict.fromkeys(("vflip", "reprob", "erasing", "grayscale-prob", "augmentation", "augmentations"), _TRANSFORMS),
    "layer-decay": "--train discriminative --set model.decay=0.75",
    "validation-batch-size": "evaluation takes the images of --batch-size at a time",
    **dict.fromkeys(
        ("warmup-lr", "warmup-begin-lr", "warmup-mode", "warmup-prefix"),
        "--warmup-epochs 5 --set optim.warmup=linear:0.1, constant:0.1 or power:2; 0.1 is a share of the peak",
    ),
    **dict.fromkeys(("warmup-steps",), "--warmup-epochs says how long the warm-up is"),
    **dict.fromkeys(("pct-start", "div-factor", "max-lr"), "--schedule one-cycle,up=0.3,from=0.04"),
    **dict.fromkeys(("cooldown-epochs",), "--schedule 'cosine:80,to=0.01 constant:10', of 80 and 10 epochs"),
    **dict.fromkeys(
        ("lr-cycle-mul", "lr-cycle-decay", "lr-cycle-limit", "t-mult"), "--schedule restarts,every=10,times=2"
    ),
    **dict.fromkeys(
        ("max-update", "lr-step", "stop-factor-lr", "pwr"), "--schedule mxnet/poly,max_update=1000 (docs: schedules)"
    ),
    "augment": "--set data.augment=resized-crop, pad-crop or none",
    **dict.fromkeys(("train-size-schedule", "progressive-resizing"), "--grow-size 128@0,160@6,192@12"),
    "nesterov": "--optimizer nag; the default recipe of steady train has it too",
    **dict.fromkeys(("label", "label-col", "target", "y"), "the folders name the classes; or --labels FILE, a table"),
    "betas": "--set optim.betas=[0.9,0.999]",
    **dict.fromkeys(
        ("log-wandb", "wandb", "logger", "tensorboard", "mlflow"),
        "steady report RUN --to wandb --follow beside it (or tensorboard, mlflow, trackio)",
    ),
}
"""Word -> what to give instead: the same in other words, or what comes nearest."""

NOT_YET = {
    **dict.fromkeys(("monitor", "eval-metric", "metric"), "choosing the best weights by anything but top-1"),
    "aug-splits": "splitting a batch by augmentation (AugMix's loss)",
    **dict.fromkeys(("drop-block", "jsd-loss", "bn-momentum", "bn-eps"), "this"),
}
"""Word -> what it asks for, which is not there."""


def advice(word: str) -> str:
    """Say what to give instead of a word of another trainer, in a sentence; empty where nothing is known of it.

    >>> advice("--amp"), advice("--jsd-loss")[:19]
    (' Instead: --precision bf16, or fp16.', ' Not supported yet:')
    """
    plain = plain_word(word)
    if plain in OTHERWISE:
        return f" Instead: {OTHERWISE[plain]}."
    return f" Not supported yet: {NOT_YET[plain]}." if plain in NOT_YET else ""


def plain_word(word: str) -> str:
    """Return a word as the tables have it: without its part and dashes, in small letters."""
    return word.rpartition(".")[2].lstrip("-").replace("_", "-").lower()

"""Words of timm, Lightning, Keras and MXNet for flags that are called otherwise here, or not there.

Words that are exactly a setting of the recipe stand at its field (:mod:`steadytrain.config.parts`). A word is looked up
without its dashes: ``--weight-decay``, ``weight_decay`` and ``optim.weight_decay`` are one.
"""

from __future__ import annotations

_DATA_FIRST = "the data come first: steady train DATA"
_FREEZE = (
    "--train head trains the classifier alone, --set model.freeze=conv_stem,blocks.0 freezes parts by name,"
    " --set model.batch_norm=frozen keeps the statistics"
)
_HUB = "steady export RUN -o FOLDER writes a folder for the hub"
_GPUS = "--device cuda:1 takes that GPU, --device cuda:0,2 these two, --procs auto all, steady launch other machines"
_PARTS = "--batch-size counts all images of an update; --set optim.accumulate=4 computes them in four parts"
_RESUME = "the same command resumes its run, and so does steady resume RUN"
_RUN = "--run FOLDER is where a run writes everything"
_SIXTEEN = "--precision bf16, or fp16"
_AREA = "--set data.area=[0.08,1] and --set data.ratio=[0.75,1.33] say what random crops take"
_SCALING = "--set data.mean=[0.485,0.456,0.406] and --set data.std=[0.229,0.224,0.225], of values from 0 to 1"
_TRANSFORMS = "--transforms randaugment:2,9,erase:0.25,mixup:0.2 (docs: augmentation)"
_WHERE = "--schedule step --set optim.milestones=[30,60,80], in epochs; or --schedule factor,every=30"

_DISTILLATION = "distillation, a loss against a teacher's answers"
_NAFLEX = "NaFlex, images of several sizes and sequences of several lengths in a batch"
_STEPS = "--set budget.steps=100 ends a run after so many updates"
_TRACKERS = "--track wandb sends the run while it trains (or tensorboard, mlflow, trackio)"
_VERBS = "steady evaluate RUN DATA, and steady predict RUN IMAGE"

MODEL_OPTIONS = {
    "layer-before-fullc": "layer_before_fullc",
    "gp": "global_pool",
    **dict.fromkeys(("drop", "drop-rate", "dropout"), "drop_rate"),
    **dict.fromkeys(("drop-path", "drop-path-rate"), "drop_path_rate"),
    "drop-block": "drop_block_rate",
    "bn-momentum": "bn_momentum",
    "bn-eps": "bn_eps",
}
"""Word -> the keyword of a model's factory that it is, where the model has it."""

OTHERWISE = {
    **dict.fromkeys(("config", "c"), "--recipe FILE, whose keys steady train --help-recipe lists"),
    "print-config": "--explain prints what would be trained",
    "dataset-download": "steady fetch NAME downloads a public data set; then it is DATA",
    "class-map": "--classes CARD.json says the classes and their order",
    "in-chans": "the data and --set data.mean, of 1 or 3 numbers, say the channels",
    **dict.fromkeys(("fuser", "torchscript"), "--compile compiles the network (torch.compile)"),
    "epoch-repeats": "--epochs counts the passes; --set every.evaluate_epochs=3 evaluates every third",
    "drop-connect": "--set model.options.drop_path_rate=0.1, where the model has it",
    "mixup-off-epoch": "a second run without --transforms, from --weights RUN of the first",
    "color-jitter-prob": "--transforms color:0.4 changes every image",
    "bce-pos-weight": "--class-weights balanced, or --loss pkg.mod:factory",
    **dict.fromkeys(("bce-sum", "bce-target-thresh"), "--loss pkg.mod:factory, your own"),
    "augmix-severity": "--transforms augmix:3,3,3, whose first number is the severity",
    "lr-min": "--set optim.final=0.01 says the last rate as a share of the peak",
    "patience-epochs": "--schedule plateau,patience=10, in evaluations",
    "save-images": "steady feed DATA --show images.html shows what is trained on",
    "tta": "steady evaluate RUN --tta flip",
    "val-resize-size": "--set data.crop=0.875, the share of the shorter side that evaluation crops: 224 of 256",
    "cache-dataset": "steady pack DATA -o train.rec; images that fit into memory are kept decoded anyway",
    **dict.fromkeys(("test-only", "evaluate", "test", "validate", "predict"), _VERBS),
    **dict.fromkeys(("train-img-sizes", "train-batch-sizes", "train-size-probs"), "--grow-size 128@0,160@6,192@12"),
    **dict.fromkeys(("train-size-schedule-spread", "train-size-random-mix"), "--grow-size 128@0,160@6,192@12"),
    **dict.fromkeys(
        ("train-batches-per-epoch", "limit-train-batches", "overfit-batches", "fast-dev-run", "limit"), _STEPS
    ),
    **dict.fromkeys(
        ("limit-val-batches", "limit-test-batches", "limit-predict-batches"),
        "each image is evaluated; --set every.evaluate_epochs=5 does so less often",
    ),
    **dict.fromkeys(("min-epochs", "min-steps"), "without --patience a run has all its --epochs"),
    **dict.fromkeys(
        ("callbacks", "plugins", "train-dataloaders", "val-dataloaders", "datamodule"),
        "your own loop on our parts (docs: own-loop)",
    ),
    "profiler": "steady diagnose RUN and steady train ... --probe say where the time goes",
    "detect-anomaly": "steady replay RUN repeats the update that was not finite",
    "model-registry": _TRACKERS,
    "test-io": "steady feed DATA measures the loader alone",
    "top-k": "top-1 and top-5 are always computed; steady predict RUN IMAGE --top 5",
    "initializer": "the model's own initial weights, or --weights FILE",
    "pad-size": "--set data.augment=pad-crop --set data.pad=4",
    "use-imagenet-data-augmentation": _TRANSFORMS,
    **dict.fromkeys(("profile-worker-suffix", "profile-server-suffix"), "steady diagnose RUN says where the time goes"),
    **dict.fromkeys(("amp", "amp-dtype", "amp-level", "use-amp", "fp16", "half", "mixed-precision", "bf16"), _SIXTEEN),
    **dict.fromkeys(
        (
            "resume",
            "resume-from-checkpoint",
            "resume-from",
            "initial-epoch",
            "ckpt",
            "ckpt-path",
            "checkpoint",
            "load-epoch",
            "no-resume-opt",
            "start-epoch",
        ),
        _RESUME,
    ),
    **dict.fromkeys(
        ("overwrite-output-dir", "fresh", "force", "overwrite"),
        "another --run FOLDER starts over; the same one resumes",
    ),
    **dict.fromkeys(("work-dir", "logging-dir"), _RUN),
    **dict.fromkeys(
        ("output", "output-dir", "out", "save-dir", "model-prefix", "logdir", "log-dir", "name", "o"), _RUN
    ),
    **dict.fromkeys(
        ("experiment", "project", "default-root-dir", "checkpoint-dir", "run-name", "exp-name", "exist-ok"), _RUN
    ),
    **dict.fromkeys(("freeze", "frozen", "unfreeze", "freeze-backbone", "freeze-layers", "freeze-bn"), _FREEZE),
    **dict.fromkeys(("stochastic-weight-averaging", "model-swa"), "--set optim.swa=0.75 averages the last quarter"),
    **dict.fromkeys(
        ("early-stopping", "early-stop", "early-stopping-patience"),
        "--patience 3 ends a run after 3 evaluations without a gain",
    ),
    **dict.fromkeys(
        ("max-time", "time-limit", "time-budget", "time"), "--set budget.minutes=60 ends a run by the clock"
    ),
    **dict.fromkeys(
        ("presets", "quality"), "--model timm/NAME, of a larger network (steady models); --budget-minutes 10"
    ),
    **dict.fromkeys(
        ("freeze-epochs", "unfreeze-epoch", "freeze-base", "freeze-encoder"),
        "--train head:1+discriminative trains the classifier for one epoch first",
    ),
    **dict.fromkeys(("find-lr", "auto-lr-find", "lr-find"), "steady schedule --find-lr DATA"),
    "auto-scale-batch-size": "--batch-size auto",
    **dict.fromkeys(
        ("num-trials", "n-trials", "hyperparameters"), "steady sweep DATA --over 'lr=1e-3..1 log' --search 20"
    ),
    **dict.fromkeys(("folds", "fold", "k-fold", "n-folds", "cv"), "--repeats 5 trains with five seeds"),
    **dict.fromkeys(("tag", "tags", "notes", "note", "comment"), "steady runs RUN --tag good --note 'what for'"),
    **dict.fromkeys(("dry-run", "debug"), "--explain prints what would be trained; --epochs 0.01 trains a little"),
    "steps-per-epoch": "an epoch is one pass over the images; --set budget.steps=1000 sets the updates of a run",
    **dict.fromkeys(
        ("validation-freq", "eval-strategy", "evaluation-strategy", "save-strategy", "eval-steps"),
        "--set every.evaluate_epochs=1",
    ),
    **dict.fromkeys(("item-tfms", "batch-tfms"), _TRANSFORMS),
    "fraction": "steady pack DATA part --train-per-class 100 makes a smaller set",
    **dict.fromkeys(("train-size", "split"), "--holdout 0.2 is the share for validation"),
    "tf32": "--precision tf32",
    "gradient-checkpointing": "--recompute",
    **dict.fromkeys(("linear-probe", "linear-probing"), "--train probe, or --train probe+discriminative"),
    **dict.fromkeys(("gpus", "gpu", "devices", "accelerator", "strategy", "kv-store", "num-gpus", "world-size"), _GPUS),
    **dict.fromkeys(("cuda", "device-ids", "gpu-ids", "ngpus", "ngpu", "nproc-per-node"), _GPUS),
    **dict.fromkeys(("grad-accum-steps", "accumulate-grad-batches", "accumulate", "gradient-accumulation"), _PARTS),
    **dict.fromkeys(("grad-accum", "accum-iter", "accum-steps", "gradient-accumulation-steps", "iter-size"), _PARTS),
    **dict.fromkeys(("per-device-train-batch-size", "batch-size-per-gpu"), _PARTS),
    **dict.fromkeys(
        ("data-dir", "data-path", "data-train", "train-dir", "dataset", "data-set", "data", "train-split"), _DATA_FIRST
    ),
    **dict.fromkeys(("data-root", "train-data", "imagenet-path", "data-config", "path"), _DATA_FIRST),
    **dict.fromkeys(
        ("dataset-name", "dataset-config-name"), f"{_DATA_FIRST}; steady fetch fetches public ones by name"
    ),
    **dict.fromkeys(("validation-dir", "val-dir", "validation-data", "data-val"), "--val DATA"),
    "label-column-name": "--label-column NAME, of a table",
    **dict.fromkeys(("image-column-name", "image-column"), "--path-column NAME, of a table"),
    **dict.fromkeys(("model-name-or-path", "net", "arch-name", "learner", "config-name"), "--model timm/NAME"),
    **dict.fromkeys(("load-from", "pretrained-weights"), "--weights FILE"),
    **dict.fromkeys(("max-train-samples", "max-eval-samples"), "steady pack DATA part --train-per-class 100"),
    **dict.fromkeys(("push-to-hub", "push-to-hub-model-id", "hub-model-id", "hub-token"), _HUB),
    **dict.fromkeys(("adam-beta1", "adam-beta2"), "--set optim.betas=[0.9,0.999]"),
    "adam-epsilon": "--set optim.eps=1e-8",
    **dict.fromkeys(("fit-one-cycle", "one-cycle", "lr-max"), "--epochs 5 --schedule one-cycle --lr 0.003"),
    **dict.fromkeys(("to-fp16", "mixed-float16", "opt-level"), _SIXTEEN),
    **dict.fromkeys(("fliplr", "flipud"), "--set data.flip=true, or false; --transforms vflip:0.5"),
    **dict.fromkeys(("hsv-h", "hsv-s", "hsv-v"), "--transforms color:0.4"),
    "label-smooth": "--label-smoothing 0.1",
    **dict.fromkeys(("mean", "std", "rgb-mean", "rgb-std", "normalize"), _SCALING),
    **dict.fromkeys(("decay-epochs", "decay-milestones", "milestones", "lr-step-epochs", "step-size"), _WHERE),
    **dict.fromkeys(("scale", "ratio", "area", "crop-area"), _AREA),
    **dict.fromkeys(("hflip", "flip"), "--set data.flip=true, or false"),
    **dict.fromkeys(("sync-bn", "syncbn", "sync-batchnorm"), "--set model.batch_norm=synchronous"),
    **dict.fromkeys(
        ("num-classes", "nb-classes"), "the data say how many classes there are; --classes FILE names them"
    ),
    **dict.fromkeys(("model-ema", "use-ema"), "--ema 0.999 keeps averaged weights"),
    **dict.fromkeys(("min-lr", "eta-min"), "--set optim.final=0.01 says the last rate as a share of the peak"),
    **dict.fromkeys(("input-size", "image-shape"), "--size 224 is the side of the square that the model sees"),
    **dict.fromkeys(("num-layers", "depth"), "--model timm/resnet50; or steady mxnet, before an old command line"),
    "a": "--model NAME",
    "p": "--set every.log_steps=10",
    "e": _VERBS,
    **dict.fromkeys(("v", "q", "quiet"), "a terminal shows progress, a file gets lines; 2> log keeps them"),
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
    **dict.fromkeys(
        ("warmup-steps", "warmup-ratio", "num-warmup-steps", "warm"), "--warmup-epochs says how long the warm-up is"
    ),
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
        (
            "log-wandb",
            "wandb",
            "wandb-project",
            "wandb-tags",
            "wandb-resume-id",
            "logger",
            "report-to",
            "tensorboard",
            "mlflow",
        ),
        _TRACKERS,
    ),
}
"""Word -> what to give instead: the same in other words, or what comes nearest."""

NOT_YET = {
    **dict.fromkeys(("eval-metric", "metric"), "choosing the best weights by anything but top-1"),
    "aug-splits": "splitting a batch by augmentation (AugMix's loss)",
    **dict.fromkeys(("jsd-loss", "resplit", "split-bn"), "splitting a batch by augmentation (AugMix's loss)"),
    **dict.fromkeys(("lr-noise", "lr-noise-pct", "lr-noise-std"), "noise on the learning rate"),
    **dict.fromkeys(("head-init-scale", "head-init-bias"), "another start of the classifier (--train probe fits it)"),
    "fast-norm": "norms in 16 bits",
    "device-modules": "devices other than CPUs and NVIDIA's GPUs",
    "cutmix-minmax": "limits of CutMix's boxes",
    "model-ema-force-cpu": "averaged weights in the memory of another device",
    "variable-batch-loss-scale": "batches of several sizes in an epoch",
    **dict.fromkeys(
        (
            *("naflex-loader", "naflex-train-seq-lens", "naflex-max-seq-len", "naflex-patch-sizes"),
            *("naflex-patch-size-probs", "naflex-loss-scale", "naflex-patchify-channels-first"),
        ),
        _NAFLEX,
    ),
    **dict.fromkeys(
        (
            *("kd-model-name", "kd-distill-type", "kd-loss-type", "distill-loss-weight", "task-loss-weight"),
            *("kd-temperature", "kd-student-feature-dim", "kd-teacher-feature-dim", "kd-token-distill-type"),
        ),
        _DISTILLATION,
    ),
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

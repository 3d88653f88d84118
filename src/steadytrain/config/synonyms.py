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
_SIXTEEN = "--precision bf16, or fp16"
_AREA = "--set data.area=[0.08,1] and --set data.ratio=[0.75,1.33] say what random crops take"
_SCALING = "--set data.mean=[0.485,0.456,0.406] and --set data.std=[0.229,0.224,0.225], of values from 0 to 1"
_WHERE = "--schedule step --set optim.milestones=[30,60,80], in epochs; or --schedule factor,every=30"

_STEPS = "--set budget.steps=100 ends a run after so many updates"

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

_INSTEAD = {
    "--recipe FILE, whose keys steady train --help-recipe lists": "config c",
    "--explain prints what would be trained": "print-config",
    "steady fetch NAME downloads a public data set; then it is DATA": "dataset-download",
    "--classes CARD.json says the classes and their order": "class-map",
    "the data and --set data.mean, of 1 or 3 numbers, say the channels": "in-chans",
    "--compile compiles the network (torch.compile)": "fuser torchscript",
    "--epochs counts the passes; --set every.evaluate_epochs=3 evaluates every third": "epoch-repeats",
    "--set model.options.drop_path_rate=0.1, where the model has it": "drop-connect",
    "a second run without --transforms, from --weights RUN of the first": "mixup-off-epoch",
    "--transforms color:0.4 changes every image": "color-jitter-prob",
    "--class-weights balanced, or --loss pkg.mod:factory": "bce-pos-weight",
    "--loss pkg.mod:factory, your own": "bce-sum bce-target-thresh",
    "--transforms augmix:3,3,3, whose first number is the severity": "augmix-severity",
    "--set optim.final=0.01 says the last rate as a share of the peak": "lr-min min-lr eta-min",
    "--schedule plateau,patience=10, in evaluations": "patience-epochs",
    "steady feed DATA --show images.html shows what is trained on": "save-images",
    "steady evaluate RUN --tta flip": "tta",
    "--set data.crop=0.875, the share of the shorter side that evaluation crops: 224 of 256": "val-resize-size",
    "steady pack DATA -o train.rec; images that fit into memory are kept decoded anyway": "cache-dataset",
    "steady evaluate RUN DATA, and steady predict RUN IMAGE": "test-only evaluate test validate predict e",
    "--grow-size 128@0,160@6,192@12": (
        "train-img-sizes train-batch-sizes train-size-probs train-size-schedule-spread train-size-random-mix "
        "train-size-schedule progressive-resizing"
    ),
    _STEPS: "train-batches-per-epoch limit-train-batches overfit-batches fast-dev-run limit",
    "each image is evaluated; --set every.evaluate_epochs=5 does so less often": (
        "limit-val-batches limit-test-batches limit-predict-batches"
    ),
    "without --patience a run has all its --epochs": "min-epochs min-steps",
    "your own loop on our parts (docs: own-loop)": "callbacks plugins train-dataloaders val-dataloaders datamodule",
    "steady diagnose RUN and steady train ... --probe say where the time goes": "profiler",
    "steady replay RUN repeats the update that was not finite": "detect-anomaly",
    "--track wandb sends the run while it trains (or tensorboard, mlflow, trackio)": (
        "model-registry log-wandb wandb wandb-project wandb-tags wandb-resume-id logger report-to tensorboard mlflow"
    ),
    "steady feed DATA measures the loader alone": "test-io",
    "top-1 and top-5 are always computed; steady predict RUN IMAGE --top 5": "top-k",
    "the model's own initial weights, or --weights FILE": "initializer",
    "--set data.augment=pad-crop --set data.pad=4": "pad-size",
    "--transforms randaugment:2,9,erase:0.25,mixup:0.2 (docs: augmentation)": (
        "use-imagenet-data-augmentation item-tfms batch-tfms mixup cutmix aa auto-augment randaugment rand-aug "
        "trivial-augment color-jitter mix vflip reprob erasing grayscale-prob augmentation augmentations"
    ),
    "steady diagnose RUN says where the time goes": "profile-worker-suffix profile-server-suffix",
    _SIXTEEN: "amp amp-dtype amp-level use-amp fp16 half mixed-precision bf16 to-fp16 mixed-float16 opt-level",
    "the same command resumes its run, and so does steady resume RUN": (
        "resume resume-from-checkpoint resume-from initial-epoch ckpt ckpt-path checkpoint load-epoch "
        "no-resume-opt start-epoch"
    ),
    "another --run FOLDER starts over; the same one resumes": "overwrite-output-dir fresh force overwrite",
    "--run FOLDER is where a run writes everything": (
        "work-dir logging-dir output output-dir out save-dir model-prefix logdir log-dir name o experiment "
        "project default-root-dir checkpoint-dir run-name exp-name exist-ok"
    ),
    _FREEZE: "freeze frozen unfreeze freeze-backbone freeze-layers freeze-bn",
    "--set optim.swa=0.75 averages the last quarter": "stochastic-weight-averaging model-swa",
    "--patience 3 ends a run after 3 evaluations without a gain": "early-stopping early-stop early-stopping-patience",
    "--set budget.minutes=60 ends a run by the clock": "max-time time-limit time-budget time",
    "--model timm/NAME, of a larger network (steady models); --budget-minutes 10": "presets quality",
    "--train head:1+discriminative trains the classifier for one epoch first": (
        "freeze-epochs unfreeze-epoch freeze-base freeze-encoder"
    ),
    "steady schedule --find-lr DATA": "find-lr auto-lr-find lr-find",
    "--batch-size auto": "auto-scale-batch-size",
    "steady sweep DATA --over 'lr=1e-3..1 log' --search 20": "num-trials n-trials hyperparameters",
    "--repeats 5 trains with five seeds": "folds fold k-fold n-folds cv",
    "steady runs RUN --tag good --note 'what for'": "tag tags notes note comment",
    "--explain prints what would be trained; --epochs 0.01 trains a little": "dry-run debug",
    "an epoch is one pass over the images; --set budget.steps=1000 sets the updates of a run": "steps-per-epoch",
    "--set every.evaluate_epochs=1": "validation-freq eval-strategy evaluation-strategy save-strategy eval-steps",
    "steady pack DATA part --train-per-class 100 makes a smaller set": "fraction",
    "--holdout 0.2 is the share for validation": "train-size split",
    "--precision tf32": "tf32",
    "--recompute": "gradient-checkpointing",
    "--train probe, or --train probe+discriminative": "linear-probe linear-probing",
    "--device cuda:1 takes that GPU, --device cuda:0,2 these two, --procs auto all, steady launch other machines": (
        "gpus gpu devices accelerator strategy kv-store num-gpus world-size cuda device-ids gpu-ids ngpus ngpu "
        "nproc-per-node"
    ),
    "--batch-size counts all images of an update; --set optim.accumulate=4 computes them in four parts": (
        "grad-accum-steps accumulate-grad-batches accumulate gradient-accumulation grad-accum accum-iter "
        "accum-steps gradient-accumulation-steps iter-size per-device-train-batch-size batch-size-per-gpu"
    ),
    _DATA_FIRST: (
        "data-dir data-path data-train train-dir dataset data-set data train-split data-root train-data "
        "imagenet-path data-config path"
    ),
    f"{_DATA_FIRST}; steady fetch fetches public ones by name": "dataset-name dataset-config-name",
    "--val DATA": "validation-dir val-dir validation-data data-val",
    "--label-column NAME, of a table": "label-column-name",
    "--path-column NAME, of a table": "image-column-name image-column",
    "--model timm/NAME": "model-name-or-path net arch-name learner config-name",
    "--weights FILE": "load-from pretrained-weights",
    "steady pack DATA part --train-per-class 100": "max-train-samples max-eval-samples",
    _HUB: "push-to-hub push-to-hub-model-id hub-model-id hub-token",
    "--set optim.betas=[0.9,0.999]": "adam-beta1 adam-beta2 betas",
    "--set optim.eps=1e-8": "adam-epsilon",
    "--epochs 5 --schedule one-cycle --lr 0.003": "fit-one-cycle one-cycle lr-max",
    "--set data.flip=true, or false; --transforms vflip:0.5": "fliplr flipud",
    "--transforms color:0.4": "hsv-h hsv-s hsv-v",
    "--label-smoothing 0.1": "label-smooth",
    _SCALING: "mean std rgb-mean rgb-std normalize",
    _WHERE: "decay-epochs decay-milestones milestones lr-step-epochs step-size",
    _AREA: "scale ratio area crop-area",
    "--set data.flip=true, or false": "hflip flip",
    "--set model.batch_norm=synchronous": "sync-bn syncbn sync-batchnorm",
    "the data say how many classes there are; --classes FILE names them": "num-classes nb-classes",
    "--ema 0.999 keeps averaged weights": "model-ema use-ema",
    "--size 224 is the side of the square that the model sees": "input-size image-shape",
    "--model timm/resnet50; or steady mxnet, before an old command line": "num-layers depth",
    "--model NAME": "a",
    "--set every.log_steps=10": "p",
    "a terminal shows progress, a file gets lines; 2> log keeps them": "v q quiet",
    "channels last is usual; --set precision.channels_last=false": "channels-last memory-format",
    "--loss binary": "bce-loss",
    "--balance classes": "balanced-sampling sampler weighted-sampler oversample",
    "--loss focal, or focal:GAMMA": "focal-loss",
    "steady finetune starts from pretrained weights; for train, --set model.pretrained=true": "pretrained",
    "--train discriminative --set model.decay=0.75": "layer-decay",
    "evaluation takes the images of --batch-size at a time": "validation-batch-size",
    "--warmup-epochs 5 --set optim.warmup=linear:0.1, constant:0.1 or power:2; 0.1 is a share of the peak": (
        "warmup-lr warmup-begin-lr warmup-mode warmup-prefix"
    ),
    "--warmup-epochs says how long the warm-up is": "warmup-steps warmup-ratio num-warmup-steps warm",
    "--schedule one-cycle,up=0.3,from=0.04": "pct-start div-factor max-lr",
    "--schedule 'cosine:80,to=0.01 constant:10', of 80 and 10 epochs": "cooldown-epochs",
    "--schedule restarts,every=10,times=2": "lr-cycle-mul lr-cycle-decay lr-cycle-limit t-mult",
    "--schedule mxnet/poly,max_update=1000 (docs: schedules)": "max-update lr-step stop-factor-lr pwr",
    "--set data.augment=resized-crop, pad-crop or none": "augment",
    "--optimizer nag; the default recipe of steady train has it too": "nesterov",
    "the folders name the classes; or --labels FILE, a table": "label label-col target y",
}
OTHERWISE = {word: text for text, words in _INSTEAD.items() for word in words.split()}
"""Word -> what to give instead: the same in other words, or what comes nearest."""

_ABSENT = {
    "choosing the best weights by anything but top-1": "eval-metric metric",
    "splitting a batch by augmentation (AugMix's loss)": "aug-splits jsd-loss resplit split-bn",
    "noise on the learning rate": "lr-noise lr-noise-pct lr-noise-std",
    "another start of the classifier (--train probe fits it)": "head-init-scale head-init-bias",
    "norms in 16 bits": "fast-norm",
    "devices other than CPUs and NVIDIA's GPUs": "device-modules",
    "limits of CutMix's boxes": "cutmix-minmax",
    "averaged weights in the memory of another device": "model-ema-force-cpu",
    "batches of several sizes in an epoch": "variable-batch-loss-scale",
    "NaFlex, images of several sizes and sequences of several lengths in a batch": (
        "naflex-loader naflex-train-seq-lens naflex-max-seq-len naflex-patch-sizes naflex-patch-size-probs "
        "naflex-loss-scale naflex-patchify-channels-first"
    ),
    "distillation, a loss against a teacher's answers": (
        "kd-model-name kd-distill-type kd-loss-type distill-loss-weight task-loss-weight kd-temperature "
        "kd-student-feature-dim kd-teacher-feature-dim kd-token-distill-type"
    ),
}
NOT_YET = {word: text for text, words in _ABSENT.items() for word in words.split()}
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

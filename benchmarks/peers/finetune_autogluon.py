"""AutoGluon's MultiModalPredictor at its defaults, but for the network and the epochs: its own script has no command.

It gets ``validation/`` to choose by, as it would hold out a part of the training images otherwise.

usage: python finetune_autogluon.py FOLDER WEIGHTS EPOCHS SEED SIZE OUT [SECONDS]
       SECONDS: its time limit, for which images are loaded in its own process; FOLDER holds train/, validation/ and
       test/; prints {"top1": ...} of test/
"""

import json
import sys
from pathlib import Path

import pandas
import timm
import torch
from autogluon.multimodal import MultiModalPredictor
from finetune_weights import MEAN, NAME, STD, network
from timm.models import register_model


@register_model
def mobilenetv2_same(pretrained=False, **how):
    return timm.models.mobilenetv2_100(pretrained=pretrained, pad_type="same", **how)


def checkpoint(folder, weights, size):
    """Write the network as AutoGluon loads one from a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(network(weights, 0).state_dict(), folder / "pytorch_model.bin")
    shown = {"input_size": [3, size, size], "mean": MEAN, "std": STD, "interpolation": "bicubic", "crop_pct": 0.875}
    config = {"architecture": "mobilenetv2_same", "num_features": 1280, "num_classes": 0}
    (folder / "config.json").write_text(json.dumps({**config, "pretrained_cfg": {"architecture": NAME, **shown}}))
    return str(folder)


def table(folder, part):
    files = sorted(Path(folder, part).glob("*/*"))
    return pandas.DataFrame({"image": map(str, files), "label": [path.parent.name for path in files]})


def main(folder, weights, epochs, seed, size, out, seconds=None):
    local = checkpoint(Path(out) / "weights", weights, size)
    predictor = MultiModalPredictor(label="label", problem_type="multiclass", path=f"{out}/predictor", verbosity=1)
    predictor.fit(
        table(folder, "train"),
        tuning_data=table(folder, "validation"),
        seed=seed,
        time_limit=seconds,
        hyperparameters={
            "model.names": ["timm_image"],
            "model.timm_image.checkpoint_name": local,
            "optim.max_epochs": epochs,
            "env.num_workers": 2 if seconds is None else 0,
            "env.accelerator": "cpu",
        },
    )
    document = predictor.evaluate(table(folder, "test"), metrics=["accuracy"])
    print(json.dumps({"top1": document["accuracy"]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6], *map(float, sys.argv[7:8]))

"""A whole command line of another tool gets the command to type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import steadytrain as st
from steadytrain import models
from steadytrain.cli import VERBS, main
from steadytrain.cli.foreign_commands import foreign_command
from steadytrain.errors import InputError


def _ours(line: str) -> str:
    return shlex.join(foreign_command(shlex.split(line), tuple(VERBS)))


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        # Ultralytics
        (
            "yolo classify train data=photos model=yolo11n-cls.pt epochs=3 imgsz=64 name=''",
            "steady finetune photos --epochs 3 --imgsz 64",
        ),
        ("yolo classify train data=photos model=yolo11n-cls.yaml epochs=3", "steady train photos --epochs 3"),
        ("yolo task=classify mode=train data=photos cos_lr=True", "steady finetune photos --cos-lr True"),
        ("classify val model=runs/a data=photos", "steady evaluate"),
        ("yolo export model=runs/a format=openvino", "steady export"),
        # timm, torchvision's references, PyTorch's example of ImageNet, transformers
        ("./distributed_train.sh 4 photos --model seresnet34", "steady train"),
        ("validate.py photos/val --model resnet50.a1_in1k --pretrained", "steady evaluate"),
        ("torchrun --nproc_per_node=8 train.py --data-path photos --model resnet50", "steady train"),
        ("python -m torch.distributed.launch --nproc_per_node 2 --use_env train.py photos", "steady train"),
        ("CUDA_VISIBLE_DEVICES=0 python main.py -a resnet18 --pretrained photos", "steady train"),
        ("accelerate launch --num_processes 2 run_image_classification_no_trainer.py", "steady finetune"),
        # MXNet
        ("im2rec --list --recursive photos images/", "steady mxnet im2rec --list --recursive photos images/"),
        ("python train_imagenet.py --network resnet", "steady mxnet train_imagenet.py --network resnet"),
        ("fine-tune.py --pretrained-model a", "steady mxnet fine-tune.py --pretrained-model a"),
        ("parse_log train.log", "steady mxnet parse_log train.log"),
        # another name of a verb keeps the rest
        ("fine-tune photos --epochs 3", "steady finetune photos --epochs 3"),
        ("eval runs/a photos", "steady evaluate runs/a photos"),
        ("fit --data photos", "steady train --data photos"),
        ("trian photos", ""),
    ],
)
def test_a_command_line_of_another_tool_is_answered_with_the_verb_that_does_it(line: str, ours: str) -> None:
    assert _ours(line) == ours


def test_the_command_is_in_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", "train", "data=my cats", "epochs=3"]) == 2
    assert capsys.readouterr().err == (
        "steady: Unknown command \"classify\". Instead: steady finetune 'my cats' --epochs 3 (docs: help/other-tools)\n"
    )


def test_each_word_of_another_manner_is_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "data=photos", "lr0=0.01"]) == 2
    assert "flags begin with dashes: steady train photos --lr0 0.01" in capsys.readouterr().err
    assert main(["train", "photos", "optim.momentum=0.8", "epochs=3"]) == 2
    assert "flags begin with dashes: --set optim.momentum=0.8 --epochs 3" in capsys.readouterr().err
    assert main(["train", "photos", "trainer.max_epochs=3"]) == 2  # a part of Lightning's, no key of ours
    assert "flags begin with dashes: --max-epochs 3" in capsys.readouterr().err


def test_a_task_that_is_not_ours_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["segment", "train", "data=coco8.yaml"]) == 2
    assert "segment is no task of steadytrain" in capsys.readouterr().err


def test_a_file_whose_name_has_an_equals_sign_is_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data=mine").mkdir()
    assert main(["train", "data=mine"]) == 2
    assert "manner" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("vit_b_16", "Did you mean torchvision/vit_b_16?"),
        ("torchvision.models.swin_t", "Did you mean torchvision/swin_t?"),
        ("models.mobilenet_v3_large", "Did you mean torchvision/mobilenet_v3_large?"),
        ("resnet50.pth", "--weights resnet50.pth and --model NAME"),
        ("yolo11n-cls.pt", "--weights yolo11n-cls.pt and --model NAME"),
    ],
)
def test_a_model_in_the_words_of_torchvision_or_of_its_file_is_named(model: str, hint: str) -> None:
    with pytest.raises(InputError, match=re.escape(hint)):
        models.find(model)


@pytest.mark.parametrize(
    ("data", "name"), [("cifar10", "cifar10"), ("torch/CIFAR10", "cifar10"), ("hfds/food101", "food101")]
)
def test_a_public_data_set_that_is_not_here_is_one_to_fetch(data: str, name: str) -> None:
    with pytest.raises(InputError, match=f"no file or folder {data}; steady fetch {name} fetches"):
        st.default_recipe(data)
    with pytest.raises(InputError, match=r"no file or folder photos\.$"):
        st.default_recipe("photos")

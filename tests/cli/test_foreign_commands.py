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
        ("classify train", "steady train DATA"),
        ("yolo classify train data=photos model=yolo11n-cls.pt epochs=3 imgsz=64",
         "steady finetune photos --epochs 3 --imgsz 64"),
        ("yolo task=classify mode=train data=photos model=resnet18", "steady train photos --model resnet18"),
        ("mode=train task=classify data=photos", "steady train photos"),
        ("classify val model=runs/a data=photos", "steady evaluate runs/a photos"),
        ("classify predict model=runs/a source=a.jpg", "steady predict runs/a a.jpg"),
        ("yolo export model=runs/a format=openvino", "steady export runs/a -o model.xml"),
        # timm, torchvision's references, PyTorch's example of ImageNet
        ("./distributed_train.sh 4 photos --model seresnet34 --batch-size 64 --amp -j 4",
         "steady train photos --model seresnet34 --batch-size 256 --amp -j 4 --procs 4"),
        ("validate.py photos/val --model resnet50.a1_in1k --pretrained", "steady evaluate resnet50.a1_in1k photos/val"),
        ("inference.py photos --model resnet50 --checkpoint a.pth", "steady predict a.pth photos --model resnet50"),
        ("torchrun --nproc_per_node=8 train.py --data-path photos --model resnet50 --batch-size 128 --lr 0.5",
         "steady train photos --model resnet50 --batch-size 1024 --lr 0.5 --set optim.base_batch_size=none --procs 8"),
        ("python -m torch.distributed.launch --nproc_per_node 2 --use_env train.py photos",
         "steady train photos --procs 2"),
        ("torchrun --nnodes 2 --nproc_per_node 4 train.py --data-path photos -b 32",
         "steady launch --on ssh --hosts HOSTS --nodes 2 --procs 4 -- train photos -b 256"),
        ("CUDA_VISIBLE_DEVICES=0 python main.py -a resnet18 --pretrained photos",
         "steady finetune photos --model resnet18"),
        ("torchrun --nproc_per_node 8 train.py photos --train_batch_size 32",
         "steady train photos --batch-size 256 --procs 8"),
        ("torchrun --nproc_per_node=8 validate.py photos -b 256 --checkpoint a.pth",
         "steady evaluate a.pth photos -b 256"),
        ("accelerate launch --num_processes 4 --num_machines 2 train.py photos -b 8",
         "steady launch --on ssh --hosts HOSTS --nodes 2 --procs 2 -- train photos -b 32"),
        ("torchrun --nproc_per_node=gpu train.py photos", "steady train photos --procs auto"),
        ("classify train model=yolov8n-cls.yaml pretrained=False data=photos", "steady train photos"),
        # words of other tools behind a verb of ours
        ("train dataset=photos", "steady train photos"),
        ("train model.name=resnet18 data.train=photos",
         "steady train DATA --set model.name=resnet18 --set data.train=photos"),
        ("predict run=runs/a image=a.jpg", "steady predict runs/a a.jpg"),
        # Lightning, transformers
        ("fit --data photos --trainer.max_epochs=10", "steady train photos --trainer.max_epochs 10"),
        ("main.py test --ckpt_path best.ckpt", "steady evaluate best.ckpt"),
        ("accelerate launch --num_processes 2 run_image_classification_no_trainer.py --train_dir photos",
         "steady finetune photos --procs 2"),
        # MXNet
        ("im2rec --list --recursive photos images/", "steady mxnet im2rec --list --recursive photos images/"),
        ("python train_imagenet.py --network resnet", "steady mxnet train_imagenet.py --network resnet"),
        ("fine-tune.py --pretrained-model a", "steady mxnet fine-tune.py --pretrained-model a"),
        ("parse_log train.log", "steady mxnet parse_log train.log"),
        # verbs alone keep the rest
        ("fine-tune photos --epochs 3", "steady finetune photos --epochs 3"),
        ("eval runs/a photos", "steady evaluate runs/a photos"),
        ("trian photos", ""),
    ],
)  # fmt: skip
def test_a_command_line_of_another_tool_becomes_the_command_to_type(line: str, ours: str) -> None:
    assert _ours(line) == ours


def test_the_command_to_type_is_in_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", "train", "data=my photos", "epochs=3"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "steady: Unknown command \"classify\". Instead: steady train 'my photos' --epochs 3"
        "  # else its own values: smoothed labels (--explain)"
    ]
    assert main(["train", "data=photos", "lr0=0.01"]) == 2
    said = capsys.readouterr().err
    assert "Instead: steady train photos --lr0 0.01 --set optim.base_batch_size=none" in said


def test_each_word_of_another_manner_is_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "photos", "model=resnet18", "epochs=3", "optim.momentum=0.8"]) == 2
    assert "--model resnet18 --epochs 3 --set optim.momentum=0.8" in capsys.readouterr().err


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

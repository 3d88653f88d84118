"""A batch's transforms: one order, draws by position alone, mixing within micro-batches, and clear refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from steadytrain.config import Budget, Data, Model, Recipe
from steadytrain.config.transforms import KINDS, Transform, parse_transforms, split_transforms
from steadytrain.data.transforms import Augmentation, make_own
from steadytrain.data.transforms.augment import APPLY, DRAWS
from steadytrain.errors import RecipeError
from steadytrain.events import Step
from steadytrain.run import Run
from steadytrain.training import steps, train

EACH = [
    *("vflip", "rotate:30", "shear:0.2", "randaugment:3,20,1,0.7", "trivialaugment", "autoaugment", "augmix"),
    *("color:0.4,0.3,0.2,0.1", "grey:0.5", "erase:0.5", "mixup:0.2", "cutmix:1,0.5", "mixup:0.2,cutmix:1"),
]
B, K = 16, 5


def augmentation(text: str, *, group: int = 8, seed: int = 1) -> Augmentation:
    return Augmentation(parse_transforms(split_transforms(text)), seed, (0.5, 0.4, 0.3), K, group)


@pytest.fixture(scope="module")
def images() -> Tensor:
    """uint8[16, 20, 24, 3], smooth in both directions."""
    rows, columns, number = np.mgrid[:20, :24, :B].astype(float)
    values = 120 + 60 * np.sin(rows / 5 + number) + 50 * np.cos(columns / 7 - number)
    planes = np.stack((values, values[::-1], 200 - values / 2), -1)
    return torch.from_numpy(planes.transpose(2, 0, 1, 3).clip(0, 255).astype(np.uint8).copy())


LABELS = torch.arange(B) % K
POSITIONS = np.arange(1000, 1000 + B)


@pytest.mark.parametrize("text", EACH)
def test_an_image_gets_the_same_in_whatever_batch_it_stands(images: Tensor, text: str) -> None:
    augment, before = augmentation(text), images.clone()
    whole, targets = augment(images, LABELS, POSITIONS)
    assert torch.equal(images, before), "the loader's own memory stays as it is"
    assert whole.shape == images.shape and whole.dtype == torch.uint8 and not torch.equal(whole, images)
    for part in (slice(0, 8), slice(8, 16)):
        some, their_targets = augment(images[part], LABELS[part], POSITIONS[part])
        assert torch.equal(some, whole[part]) and torch.equal(their_targets, targets[part])
    if not augment.is_mixing:
        for row in (0, 5, 15):
            image, _ = augment(images[row : row + 1], LABELS[row : row + 1], POSITIONS[row : row + 1])
            assert torch.equal(image[0], whole[row])
    assert not torch.equal(augmentation(text, seed=2)(images, LABELS, POSITIONS)[0], whole)
    assert not torch.equal(augment(images, LABELS, POSITIONS + B)[0], whole)


@pytest.mark.parametrize("text", EACH)
def test_grey_images_are_augmented_too(images: Tensor, text: str) -> None:
    transforms = parse_transforms(split_transforms(text))
    out, _ = Augmentation(transforms, 0, (0.1,), K, 8)(images[..., :1], LABELS, POSITIONS)
    assert out.shape == images[..., :1].shape


def test_the_order_that_is_typed_does_not_matter() -> None:
    texts = ["mixup:0.2", "erase:0.25", "randaugment:2,9", "vflip"]
    recipes = [Data(train="x", transforms=tuple(some)) for some in (texts, texts[::-1])]
    assert recipes[0] == recipes[1]
    assert recipes[0].transforms == ("vflip:0.5", "randaugment:2,9", "erase:0.25", "mixup:0.2")


def test_a_recipe_without_transforms_has_the_digest_that_it_had() -> None:
    recipe = Recipe(data=Data(train="x"), model=Model("resnet20"), budget=Budget(epochs=1))
    values = recipe.to_dict()
    del values["data"]["transforms"]
    assert Recipe.from_dict(values).digest == recipe.digest
    assert recipe.with_({"data.transforms": ["vflip"]}).digest != recipe.digest


def test_every_transform_is_written_as_it_is_read_and_has_its_own_draws() -> None:
    for name, kind in KINDS.items():
        assert name in {*APPLY, "mixup", "cutmix"} and name in DRAWS
        for text in (
            name if not kind.is_needed else f"{name}:0.25",
            f"{name}:cifar10" if name == "autoaugment" else name,
        ):
            if kind.is_needed and text == name:
                continue
            transform = Transform.parse(text)
            assert Transform.parse(str(transform)) == transform
    assert len({kind.number for kind in KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["mixpu:0.2"], "Did you mean mixup?"),
        (["mixup:0"], "alpha is '0'; it must be from 0.001 to 100"),
        (["erase:two"], "probability is 'two'; it must be from 0 to 1"),
        (["randaugment:2.5"], "a whole number from 1 to 8"),
        (["randaugment:2,31"], "magnitude is '31'; it must be from 0 to 30"),
        (["autoaugment:cifar"], "Did you mean cifar10?"),
        (["rotate"], "write rotate:DEGREES, such as rotate:15"),
        (["trivialaugment:3"], "it takes no values"),
        (["vflip", "vflip:0.1"], "vflip twice"),
        (["randaugment", "autoaugment"], "choose one of them"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(texts: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Data(train="x", transforms=tuple(texts))
    assert message in str(caught.value)


def test_mixup_blends_images_and_labels_by_the_same_share(images: Tensor) -> None:
    mixed, targets = augmentation("mixup:1")(images, LABELS, POSITIONS)
    for row in range(B):
        other = row // 8 * 8 + (row + 4) % 8
        share = targets[row, LABELS[row]].item()
        expected = images[row].float() * share + images[other].float() * (1 - share)
        assert LABELS[row] == LABELS[other] or torch.allclose(mixed[row].float(), expected, atol=0.51)
        assert targets[row, LABELS[other]].item() == pytest.approx(1 if LABELS[row] == LABELS[other] else 1 - share)


def test_cutmix_has_the_share_of_its_pixels(images: Tensor) -> None:
    images = images.clone()
    images[:] = torch.arange(B, dtype=torch.uint8)[:, None, None, None]
    mixed, targets = augmentation("cutmix:1")(images, LABELS, POSITIONS)
    for row in range(B):
        value = (mixed[row, :, :, 0] == row).float().mean().item()
        other = row // 8 * 8 + (row + 4) % 8
        assert set(mixed[row].flatten().tolist()) <= {row, other}
        if LABELS[row] != LABELS[other]:
            assert targets[row, LABELS[row]].item() == pytest.approx(value)


def test_erasing_takes_as_many_images_and_as_much_of_them_as_asked(images: Tensor) -> None:
    many = torch.full((2000, 20, 24, 3), 7, dtype=torch.uint8)
    out, _ = augmentation("erase:0.4,0.1,0.3")(many, torch.zeros(2000, dtype=torch.int64), np.arange(2000))
    shares = (out[..., 0] != 7).float().mean((1, 2))
    erased = shares > 0
    assert 0.35 < erased.float().mean().item() < 0.45
    assert shares[erased].min().item() > 0.08 and shares.max().item() < 0.32
    assert set(map(tuple, out[erased].reshape(-1, 3).tolist())) == {(7, 7, 7), (128, 102, 76)}


# -- transforms of the user's own ---------------------------------------------------------------------------------

HERE = "tests.data.transforms.test_augment"


def blur_or_flip() -> v2.Transform:
    return v2.Compose([v2.RandomHorizontalFlip(0.5), v2.GaussianBlur(3, sigma=(0.1, 3.0))])


def shift_levels() -> Callable[[Tensor], Tensor]:
    """Draws from all three generators, and gives numbers from 0 to 1."""

    def shift(images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8 and images.shape[1] == 3
        return images / 255 * (0.5 + 0.2 * torch.rand(1) + 0.2 * random.random() + 0.1 * np.random.rand())

    return shift


def crops() -> v2.Transform:
    return v2.CenterCrop(8)


def fails() -> v2.Transform:
    raise ValueError("no luck")


def own(text: str, *, group: int = 8, seed: int = 1) -> Augmentation:
    transforms = parse_transforms(split_transforms(text))
    own_transforms = make_own(transforms, torch.device("cpu"), (20, 24, 3), allow_import=True)
    return Augmentation(transforms, seed, (0.5, 0.4, 0.3), K, group, own_transforms)


@pytest.mark.parametrize("text", [f"{HERE}:blur_or_flip", f"{HERE}:shift_levels,vflip,{HERE}:blur_or_flip"])
def test_what_is_drawn_for_a_micro_batch_depends_on_its_position_alone(images: Tensor, text: str) -> None:
    augment = own(text)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    whole, _ = augment(images, LABELS, POSITIONS)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    assert torch.equal(states[0], after[0]) and states[1:] == after[1:], "dropout's numbers stay as they were"
    assert whole.shape == images.shape and whole.dtype == torch.uint8 and whole.is_contiguous()
    torch.manual_seed(99)
    for part in (slice(8, 16), slice(0, 8)):
        assert torch.equal(own(text)(images[part], LABELS[part], POSITIONS[part])[0], whole[part])
    assert not torch.equal(own(text, seed=2)(images, LABELS, POSITIONS)[0], whole)
    assert not torch.equal(augment(images, LABELS, POSITIONS + B)[0], whole)


def test_it_does_what_the_module_does_and_comes_before_erasing(images: Tensor) -> None:
    chain = parse_transforms(["erase:0.5", f"{HERE}:crops", "grey:0.5", "mixup:0.2", f"{HERE}:blur_or_flip"])
    assert [transform.name.rpartition(":")[2] for transform in chain] == [
        *("grey", "crops", "blur_or_flip", "erase", "mixup")
    ]
    out, _ = own(f"{HERE}:shift_levels")(images, LABELS, POSITIONS)
    for part in (slice(0, 8), slice(8, 16)):  # one factor for each micro-batch
        share = (out[part].double().sum() / images[part].double().sum()).item()
        assert 0.5 < share < 1
        assert (out[part].double() - images[part].double() * share).abs().max() < 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{HERE}:crops", r"gave torch.uint8 of shape \[2, 3, 8, 8\]; .* as many of the same size"),
        (f"{HERE}:fails", "failed: ValueError: no luck"),
        (f"{HERE}:nothing", "cannot be imported: AttributeError"),
        ("autougment:imagenet", "cannot be imported: ModuleNotFoundError: .* Did you mean autoaugment"),
    ],
)
def test_a_factory_that_cannot_be_used_is_one_line(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        own(name)


def test_one_that_a_file_names_is_imported_only_when_it_is_allowed(recipe: Recipe, tmp_path: Path) -> None:
    text = recipe.with_({"data.transforms": [f"{HERE}:blur_or_flip"]}).to_json()
    run = Run.create(tmp_path / "run", Recipe.from_json(text).with_({"optim.lr": 0.02}))
    with pytest.raises(RecipeError, match=r"would import code, .* add --transforms"):
        train(run)
    assert train(run, allow_import=True).status == "finished"


@pytest.mark.slow
def test_a_run_with_transforms_is_resumed_to_the_same_bits(recipe: Recipe, tmp_path: Path) -> None:
    transforms = ["vflip", "rotate:10", "randaugment:2,9", "color:0.4", "erase:0.25", "mixup:0.2", "cutmix:1"]
    transforms += [f"{HERE}:blur_or_flip"]
    recipe = recipe.with_({"data.transforms": transforms, "optim.accumulate": 2, "optim.ema": 0.9})
    whole, parts = (Run.create(tmp_path / name, recipe) for name in ("whole", "parts"))
    train(whole)
    seen = 0

    def stop() -> str | None:
        return "SIGTERM" if seen == 7 else None

    for event in steps(parts, stop=stop):
        seen += isinstance(event, Step)
    seen = 100
    train(parts)
    weights = [(run.directory / "model.safetensors").read_bytes() for run in (whole, parts)]
    assert weights[0] == weights[1]
    other = Run.create(tmp_path / "plain", recipe.with_({"data.transforms": []}))
    train(other)
    assert (other.directory / "model.safetensors").read_bytes() != weights[0]

"""Models that steadytrain did not train name their classes, and are evaluated on data with fewer classes."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import steadytrain as st
from steadytrain.config import Recipe
from steadytrain.data.images.decode import BadImageError, decode
from steadytrain.data.images.memory import file_bytes
from steadytrain.data.results.predictions import read_predictions
from steadytrain.errors import DataError, ModelError, RunError
from steadytrain.events import Evaluated
from steadytrain.models.class_names import imagenet_synsets
from steadytrain.training.inference import inference
from steadytrain.training.inference.inference import Files, Prediction, Predictions, open_evaluation_data
from steadytrain.training.inference.trained import Trained, find_pretrained

NAME, REPOSITORY = "timm/test_resnet.r160_in1k", "models--timm--test_resnet.r160_in1k"
CAT, LYNX, TENCH = 285, 287, 0


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub that cannot be reached, and an empty cache of its files."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Weights as timm saves them, of a network that takes every image for an Egyptian cat, else for a lynx."""
    import timm

    state: dict[str, torch.Tensor] = timm.create_model("test_resnet").state_dict()
    state["fc.weight"].zero_()
    state["fc.bias"].zero_()
    state["fc.bias"][CAT], state["fc.bias"][LYNX] = 9.0, 8.0
    return state


@pytest.fixture
def fetched(hub: Path, state: dict[str, torch.Tensor]) -> str:
    """The name of a model whose weights were fetched before."""
    snapshot = hub / REPOSITORY / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (hub / REPOSITORY / "refs").mkdir()
    (hub / REPOSITORY / "refs" / "main").write_text("abc")
    save_file(state, snapshot / "model.safetensors")
    return NAME


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """An image in colour."""
    Image.new("RGB", (60, 50), (200, 30, 90)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def save_state(module: torch.nn.Module, folder: Path) -> Path:
    """A file of a network's weights."""
    torch.save(module.state_dict(), folder / "weights.pth")
    return folder / "weights.pth"


def write_classes(folder: Path, **counts: int) -> Path:
    """A folder with so many different images in each class."""
    for number, (name, images) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for image in range(images):
            Image.new("RGB", (40, 40), (40 * number, 20 * image, 99)).save(folder / name / f"{image}.png")
    return folder


def test_a_pretrained_model_predicts_names_of_classes(fetched: str, photo: Path) -> None:
    (prediction,) = st.predict(fetched, photo, top=2)
    assert prediction.classes == ("Egyptian cat", "lynx") and prediction.probabilities[0] > prediction.probabilities[1]


@pytest.fixture(scope="module")
def unlearned(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A network with random weights."""
    import timm

    torch.manual_seed(0)
    file = save_state(timm.create_model("test_resnet"), tmp_path_factory.mktemp("unlearned"))
    return st.restore(file, model="timm/test_resnet", device="cpu")


@pytest.mark.parametrize(
    ("orientation", "side"),
    [
        *(pytest.param(orientation, 1, id=f"small, {orientation}") for orientation in range(1, 9)),
        pytest.param(6, 9, id="large, 6"),
        *(pytest.param(k, 9, id=f"large, {k}", marks=pytest.mark.slow) for k in (1, 2, 3, 4, 5, 7, 8)),
    ],
)
def test_a_photograph_that_lies_on_its_side_is_predicted_as_its_upright_copy(
    unlearned: Trained, orientation: int, side: int, tmp_path: Path
) -> None:
    rough = np.random.default_rng(3).integers(0, 256, (5, 8, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying = tmp_path / "lying.jpg"
    size = (200 * side, 130 * side)
    Image.fromarray(rough).resize(size, Image.Resampling.BICUBIC).save(lying, quality=95, exif=exif)
    decode(lying.read_bytes()).save(tmp_path / "upright.png")
    stripped = tmp_path / "stripped.jpg"  # the same pixels, and nothing that says how they lie
    Image.open(lying).save(stripped, quality="keep", exif=b"")
    images: list[str | Path | bytes] = [lying, tmp_path / "upright.png", stripped, lying.read_bytes()]
    matched, wanted, wrong, piped = (
        dict(zip(prediction.classes, prediction.probabilities, strict=True))
        for prediction in st.predict(unlearned, images, top=1000, batch_size=1)
    )
    furthest = max(abs(matched[name] - wanted[name]) for name in wanted)
    apart = max(abs(wrong[name] - wanted[name]) for name in wanted)
    assert matched == piped
    assert furthest == 0 if side == 1 else furthest < 5e-7
    assert orientation == 1 or apart > 10 * furthest + 1e-6, "lying, it is another image"


def test_weights_that_are_not_at_hand_are_one_clear_line(photo: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch the weights of .*connect to a network.*FILE model="):
        st.predict(NAME, photo).__next__()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm/resnt18", "Did you mean resnet18"),
        ("resnet20", "no pretrained weights of resnet20: .*model resnet20"),
        ("timm/vit_small_patch14_dinov2", "have no classifier: .*st.finetune"),
        ("timm/resnet50_clip.openai", "have 1,024 outputs without names"),
    ],
)
def test_a_model_that_cannot_name_classes_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        st.restore(name)


def test_what_exists_is_a_path_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (source := find_pretrained("resnet18")) is not None and source.name == "timm/resnet18"
    assert [find_pretrained(name) for name in ("runs/resnet18", "./resnet18", "resnet18.pth", "none")] == [None] * 4
    Path("resnet18").mkdir()
    assert find_pretrained("resnet18") is None
    with pytest.raises(RunError, match="resnet18 is not a run"):
        st.restore("resnet18")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_of_stock_weights_has_imagenets_names(
    state: dict[str, torch.Tensor], photo: Path, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"stock{suffix}"
    torch.save(state, path) if suffix == ".pth" else save_file(state, path)
    trained = st.restore(path, model="timm/test_resnet")
    assert next(st.predict(trained, photo, top=1)).classes == ("Egyptian cat",)
    assert "outputs are taken for ImageNet's" in trained.notes[-1] and "mean (0.5 0.5 0.5)" in trained.notes[-2]


def test_the_outputs_of_a_file_can_be_named(state: dict[str, torch.Tensor], photo: Path, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "stock.pth")
    (tmp_path / "names.txt").write_text("".join(f"kind {number}\n" for number in range(1000)))
    trained = st.restore(tmp_path / "stock.pth", model="timm/test_resnet", classes=tmp_path / "names.txt")
    assert next(st.predict(trained, photo, top=2)).classes == ("kind 285", "kind 287")
    assert next(st.predict(trained, photo, top=1, classes=[str(k) for k in range(1000)])).classes == ("285",)
    for wrong, message in ((["a", "b"], "has 2 names, and timm/test_resnet has 1,000"), (["a"] * 1000, "more than on")):
        with pytest.raises(DataError, match=message):
            st.restore(tmp_path / "stock.pth", model="timm/test_resnet", classes=wrong)
    with pytest.raises(DataError, match=r"cannot read the classes in .*none\.txt: No such file"):
        st.restore(tmp_path / "stock.pth", model="timm/test_resnet", classes=tmp_path / "none.txt")


@pytest.mark.parametrize("names", [("n02124075", "n01440764"), ("Egyptian_cat", "TENCH")])
def test_a_data_set_may_have_fewer_classes_than_the_model(
    fetched: str, tmp_path: Path, names: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_classes(tmp_path / "photos", **{names[0]: 3, names[1]: 1})
    document = st.evaluate(fetched, folder)
    how = "synset" if names[0].startswith("n0") else "name"
    assert f"{folder} has 2 of the model's 1,000 classes (matched: 2 by {how})" in capsys.readouterr().err
    assert (document.n, document.top1, document.total[CAT], document.total[TENCH]) == (4, 3 / 4, 3, 1)
    logits = torch.zeros(1000)
    logits[CAT], logits[LYNX] = 9.0, 8.0
    assert document.loss == pytest.approx(float(-logits.log_softmax(0)[[CAT] * 3 + [TENCH]].mean()), rel=1e-5)


def test_restricting_counts_the_outputs_of_the_datas_classes_alone(
    state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    state["fc.bias"][TENCH] = 5.0
    torch.save(state, tmp_path / "stock.pth")
    trained = st.restore(tmp_path / "stock.pth", model="timm/test_resnet")
    folder = write_classes(tmp_path / "photos", tench=2, lynx=1)
    assert st.evaluate(trained, folder).top1 == 0
    document = st.evaluate(trained, folder, restrict=True)
    assert (document.top1, document.top5) == (1 / 3, 1)  # the lynx; Egyptian cat is no class of the data
    two = torch.tensor([8.0, 5.0]).log_softmax(0)
    assert document.loss == pytest.approx(-float(two[0] + 2 * two[1]) / 3, rel=1e-5)


def test_classes_that_the_model_lacks_are_listed_before_anything_is_packed(
    fetched: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    folder = write_classes(tmp_path / "photos", tench=1, crane=1, unicorn=1)
    message = r"2 of the 3 classes in .* crane \(crane \(n02012849\) or .*\?\), unicorn\. .*classes="
    with pytest.raises(DataError, match=message):
        st.evaluate(fetched, folder)
    assert not list((tmp_path / "cache").rglob("*.rec"))


def test_a_file_says_which_class_of_the_model_a_class_of_the_data_is(
    fetched: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = write_classes(tmp_path / "photos", tench=1, moggy=2), tmp_path / "classes.txt"
    file.write_text("moggy\tEgyptian cat\n")
    document = st.evaluate(fetched, folder, classes=file)
    assert (document.top1, document.total[CAT]) == (2 / 3, 2)
    assert "(matched: 2 by file)" not in (errors := capsys.readouterr().err) and "1 by file" in errors
    assert st.evaluate(fetched, folder, classes={"moggy": "n02124075"}).top1 == 2 / 3
    for mapping, message in (
        ({"moggy": "unicorn"}, "that timm/test_resnet.* has not: unicorn"),
        ({"dog": "tench"}, "photos has not: dog"),
    ):
        with pytest.raises(DataError, match=message):
            st.evaluate(fetched, folder, classes=mapping)
    file.write_text("moggy\tEgyptian cat\ncat\n")
    with pytest.raises(DataError, match="line 'cat'"):
        st.evaluate(fetched, folder, classes=file)


def test_the_results_of_each_image_name_the_models_classes(fetched: str, tmp_path: Path) -> None:
    folder, file = write_classes(tmp_path / "photos", n01440764=1, n02124075=2), tmp_path / "images.csv"
    document = st.evaluate(fetched, folder, per_image=file)
    lines = [(line.true, line.predicted, line.rank == 1) for line in read_predictions(file)]
    assert lines == [("tench", "Egyptian cat", False)] + [("Egyptian cat", "Egyptian cat", True)] * 2
    assert sum(line.loss for line in read_predictions(file)) / 3 == pytest.approx(document.loss, rel=1e-4)


def test_a_record_file_without_names_has_numbers_of_outputs(fetched: str, tmp_path: Path) -> None:
    st.pack(write_classes(tmp_path / "photos", **{"0": 1, "1": 2}), tmp_path / "photos")
    assert st.evaluate(fetched, tmp_path / "photos.rec").total[:3] == (1, 2, 0)
    (tmp_path / "photos.json").unlink()
    assert st.evaluate(fetched, tmp_path / "photos.rec").total[:3] == (1, 2, 0)


def test_evaluation_says_which_class_each_number_is_taken_for(
    state: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(state, tmp_path / "weights.pth")
    folder = write_classes(tmp_path / "photos", **{"1": 1, "2": 2})

    def told(name: str) -> str:
        classes = [name.format(number) for number in range(1, 1001)]
        trained = st.restore(tmp_path / "weights.pth", model="timm/test_resnet", device="cpu", classes=classes)
        assert st.evaluate(trained, folder).total[:3] == (0, 1, 2)
        return capsys.readouterr().err

    from_one = told("class{}")
    assert "taken for places in the class list: 1 is class2, 2 is class3" in from_one
    assert "warning: " in from_one and "label 1 is class2 by its place (from 0 on), and class1 by its name" in from_one


def test_a_run_is_evaluated_on_fewer_classes_by_name(
    recipe: Recipe, write_digits: Callable[[Path, int, int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = st.Run.create(tmp_path / "run", recipe)
    st.train(run)
    whole = st.evaluate(run, write_digits(tmp_path / "ten", 200, 10))
    assert "matched" not in capsys.readouterr().err
    three = write_digits(tmp_path / "three", 200, 10)
    for digit in range(10):
        if digit not in (1, 4, 7):
            shutil.rmtree(three / str(digit))
    some = st.evaluate(run, three)
    assert "three has 3 of the model's 10 classes (matched: 3 by name)" in capsys.readouterr().err
    assert [some.right[digit] for digit in (1, 4, 7)] == [whole.right[digit] for digit in (1, 4, 7)]
    assert some.n == sum(whole.total[digit] for digit in (1, 4, 7)) and some.total[0] == 0
    for digit in (1, 7):
        shutil.rmtree(three / str(digit))
    assert st.evaluate(run, three).right[4] == whole.right[4]


def test_a_run_of_synsets_is_evaluated_on_their_names(recipe: Recipe, tmp_path: Path) -> None:
    synsets = imagenet_synsets(1000)
    folder = write_classes(tmp_path / "photos", **{synsets[CAT]: 6, synsets[TENCH]: 6, synsets[LYNX]: 6})
    changes = {"data.train": str(folder), "data.size": 16, "model.name": "digits", "batch_size": 4}
    run = st.Run.create(tmp_path / "run", recipe.with_(changes))
    st.train(run)
    document = st.evaluate(run, write_classes(tmp_path / "named", **{"lynx": 2, "egyptian cat": 3}))
    assert document.total == (0, 3, 2)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_run_is_evaluated_as_it_was_when_its_best_was_chosen(recipe: Recipe, tmp_path: Path, name: str) -> None:
    changes = {"precision.name": name, "optim.ema": 0.9, "budget.epochs": 3}
    run = st.Run.create(tmp_path / "run", recipe.with_(changes))
    st.train(run)
    scores = [event for event in run.events() if isinstance(event, Evaluated)]
    best = [event for event in scores if event.is_best][-1]
    for place in (run, run.directory / "best.safetensors"):
        document = st.evaluate(place)
        assert (document.top1, document.top5, document.n) == (best.top1, best.top5, best.n)
        assert document.loss == pytest.approx(best.loss, rel=1e-6)
    assert st.evaluate(run, which="last").top1 == scores[-1].top1


def test_a_run_without_validation_has_its_last_weights(recipe: Recipe, digits: Path, tmp_path: Path) -> None:
    run = st.Run.create(tmp_path / "run", recipe.with_({"data.holdout": 0, "budget.epochs": 1}))
    st.train(run)
    trained = st.restore(run)
    assert (trained.path.name, trained.chosen) == ("model.safetensors", "last: nothing was validated")
    with pytest.raises(DataError, match="without validation data: name the data"):
        st.evaluate(run)
    alone = shutil.copy(run.weights, tmp_path / "alone.safetensors")
    with pytest.raises(DataError, match=r"alone\.safetensors belongs to no run: name the data"):
        open_evaluation_data(st.restore(alone), None)


def write_photos(folder: Path, count: int) -> list[Path]:
    """So many different images, in colour."""
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (40 + number, 50), (7 * number, 255 - 9 * number, 90)).save(folder / f"{number:02}.png")
    return sorted(folder.iterdir())


def test_many_images_are_predicted_in_batches_as_each_alone(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "stock.pth")
    trained = st.restore(tmp_path / "stock.pth", model="timm/test_resnet", device="cpu")
    files = write_photos(tmp_path / "photos", 20)
    for number in (0, 7, 8, 19):
        files[number].write_bytes(b"no image")
    files.insert(3, tmp_path / "nowhere.png")
    alone = [prediction for path in files for prediction in st.predict(trained, path)]
    together = list(st.predict(trained, files, batch_size=8))
    assert [prediction.path for prediction in together] == files
    for this, other in zip(alone, together, strict=True):
        assert (this.path, this.classes, this.error) == (other.path, other.classes, other.error)
        assert this.probabilities == pytest.approx(other.probabilities, rel=1e-4)
    bad = {files.index(prediction.path): prediction.error for prediction in together if prediction.error is not None}
    assert sorted(bad) == [0, 3, 8, 9, 20] and bad[3] == f"cannot read {files[3]}: No such file or directory"
    assert all(not prediction.classes for prediction in together if prediction.error)


_FAULTS = """
import resource, sys
import torch
import steadytrain as st
trained = st.restore(sys.argv[1], model="timm/test_resnet", device="cpu")
images = torch.zeros(64, 3, 160, 160)
def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with torch.no_grad():
        trained.module(images)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(max(faults() for _ in range(3)))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is freed is kept where malloc is glibc's")
def test_a_pass_takes_the_memory_of_the_pass_before(tmp_path: Path) -> None:
    """Its largest output has 13 MB, 3,200 pages; taken from the system anew, each of them is a page fault."""
    import timm

    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "stock.pth")
    command = [sys.executable, "-c", _FAULTS, str(tmp_path / "stock.pth")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000


def test_images_come_from_patterns_record_files_and_bytes(fetched: str, photo: Path, tmp_path: Path) -> None:
    trained = st.restore(fetched, device="cpu")
    folder = write_classes(tmp_path / "photos", cat=2, dog=1)
    st.pack(folder, tmp_path / "packed")
    predictions = list(
        st.predict(trained, [str(folder / "*" / "0.png"), tmp_path / "packed.rec", photo.read_bytes()], top=1)
    )
    names = ["photos/cat/0.png", "photos/dog/0.png", *(f"packed.rec:{number}" for number in range(3)), "-"]
    assert [str(prediction.path).removeprefix(f"{tmp_path}/") for prediction in predictions] == names
    assert {prediction.classes for prediction in predictions} == {("Egyptian cat",)}
    with pytest.raises(DataError, match="no file for 1 of its names"):
        next(st.predict(trained, str(tmp_path / "*.gif")))


@pytest.mark.parametrize("ended_by", [DataError, KeyboardInterrupt])
def test_predictions_that_ended_early_are_never_taken_for_all(ended_by: type[BaseException]) -> None:
    closed: list[int] = []

    def stream() -> Generator[Prediction, None, None]:
        try:
            yield Prediction(Path("a"), ("cat",), (0.9,))
            raise ended_by("no more")
        finally:
            closed.append(1)

    predictions = Predictions(stream())
    for read in (len, list, lambda values: values[1], next, next, lambda values: values[:]):
        if read is next and predictions._next == 0:
            assert next(predictions).label == "cat"
            continue
        with pytest.raises(ended_by, match="no more"):
            read(predictions)
    assert predictions[0].label == "cat"
    with Predictions(stream()) as others:
        assert others[0].label == "cat"
    assert closed == [1, 1] and others[0].label == "cat"
    with pytest.raises(ValueError, match="were closed"):
        len(others)


def test_images_of_a_list_are_encoded_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []

    def encode(image: object) -> tuple[bytes, bytes]:
        encoded.append(image)
        return file_bytes(image)

    monkeypatch.setattr(inference, "file_bytes", encode)
    images = [Image.new("L", (8, 8), 9), None, np.zeros((8, 8), np.uint8)]
    for given in (images, iter(images), tuple(images)):
        del encoded[:]
        with Files(given) as files:
            assert len(files) == 3 and encoded == images[:1]
            assert files.image(0) and files.image(2)
            with pytest.raises(BadImageError, match="an image is None"):
                files.image(1)
    with pytest.raises(DataError, match="an image is"):
        Files([3.5, *images])


def test_predicting_goes_on_with_fewer_images_where_memory_runs_out(fetched: str, tmp_path: Path) -> None:
    class Small(torch.nn.Module):
        """A network with memory for three images."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if len(images) > 3:
                raise torch.OutOfMemoryError("no room")
            logits: torch.Tensor = self.module(images)
            return logits

    trained = st.restore(fetched, device="cpu")
    files = write_photos(tmp_path / "photos", 10)
    predictions = list(st.predict(replace(trained, module=Small(trained.module)), files, top=1))
    assert [prediction.path for prediction in predictions] == files and {
        prediction.classes for prediction in predictions
    } == {("Egyptian cat",)}

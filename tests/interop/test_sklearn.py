"""The estimator behaves as scikit-learn's own do, as far as its checks are about more than tables of numbers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks as checks

import steadytrain as st

APPLIES: list[Any] = [
    checks.check_estimator_cloneable,
    checks.check_estimator_tags_renamed,
    checks.check_valid_tag_types,
    checks.check_estimator_repr,
    checks.check_no_attributes_set_in_init,
    checks.check_mixin_order,
    checks.check_do_not_raise_errors_in_init_or_set_params,
    checks.check_get_params_invariance,
    checks.check_set_params,
    checks.check_parameters_default_constructible,
    checks.check_fit_score_takes_y,
    checks.check_estimators_overwrite_params,
    checks.check_dont_overwrite_parameters,
    checks.check_estimators_fit_returns_self,
    checks.check_estimators_unfitted,
    checks.check_estimators_pickle,
    checks.check_dict_unchanged,
]
EXCLUDED = {
    "check_n_features_in_after_fitting": "images have no fixed number of features: sizes may differ",
    "check_positive_only_tag_during_fit": "values of images are checked by their type, uint8 or floats from 0 to 1",
    "check_readonly_memmap_input": "the same as check_estimators_fit_returns_self here: images are copied when encoded",
}
"""Of the checks of the interface; those of the numbers (NaN, sparse rows, one feature, ...) are about tables."""


def as_images(X: Any) -> NDArray[np.float64]:
    """Rows of numbers as grey images, one pixel high: the checks know no images."""
    rows = np.asarray(X, float)
    return np.repeat((1 / (1 + np.exp(-rows)))[:, None, :], 8, 1)


class Rows(st.ImageClassifier):
    """The estimator, for the tables of the checks."""

    def fit(self, X: Any, y: Any) -> Rows:
        super().fit(as_images(X), y)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        return super().predict_proba(as_images(X) if hasattr(self, "classes_") else X)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos() -> tuple[NDArray[np.uint8], NDArray[Any]]:
    random = np.random.default_rng(0)
    images = np.concatenate([random.integers(low, low + 80, (20, 16, 16, 3)) for low in (0, 170)]).astype(np.uint8)
    order = random.permutation(40)
    return images[order], np.array(["dark"] * 20 + ["light"] * 20)[order]


SMALL: dict[str, Any] = {"pretrained": False, "epochs": 2, "device": "cpu", "batch_size": 8, "size": 16}


def test_checks_of_the_interface_apply_or_are_named_with_the_reason() -> None:
    api = {check.__name__ for check in checks._yield_api_checks(st.ImageClassifier())}
    assert api - {check.__name__ for check in APPLIES} == EXCLUDED.keys()


NEEDS_FIT = {"check_fit_score_takes_y", "check_estimators_overwrite_params", "check_dont_overwrite_parameters"}
NEEDS_FIT |= {"check_estimators_fit_returns_self", "check_estimators_pickle", "check_dict_unchanged"}


@pytest.mark.parametrize(
    "check",
    [pytest.param(each, marks=pytest.mark.slow if each.__name__ in NEEDS_FIT else ()) for each in APPLIES],
    ids=lambda each: each.__name__,
)
def test_checks_of_sklearn_pass(check: Any) -> None:
    settings: dict[str, Any] = SMALL | {"epochs": 1, "settings": {"data.fit": "squash"}}
    check("ImageClassifier", Rows("resnet20", **settings))


def test_it_learns_in_a_pipeline_and_survives_a_pickle(photos: tuple[NDArray[np.uint8], NDArray[Any]]) -> None:
    X, y = photos
    classifier = st.ImageClassifier("resnet20", **SMALL | {"epochs": 4})
    with pytest.raises(NotFittedError):
        classifier.predict(X)
    pipeline = make_pipeline(classifier).fit(X, y)
    assert pipeline.score(X, y) > 0.9 and list(pipeline.classes_) == ["dark", "light"]
    p = pipeline.predict_proba(X[:5])
    assert p.shape == (5, 2) and np.allclose(p.sum(1), 1, atol=1e-5)
    again = pickle.loads(pickle.dumps(pipeline))
    assert (again.predict_proba(X[:5]) == p).all()
    assert (clone(classifier).fit(X, y).predict_proba(X[:5]) == p).all()  # the run is finished already
    assert Path(classifier.run_, "model.safetensors").exists() and "top1" in classifier.metrics_


def test_paths_and_numbers_as_classes(photos: tuple[NDArray[np.uint8], NDArray[Any]]) -> None:
    X, y = photos
    paths = [f"{number}.png" for number in range(len(X))]
    for image, path in zip(X, paths, strict=True):
        Image.fromarray(image).save(path)
    numbers = np.where(y == "dark", 7, 3)
    classifier = st.ImageClassifier("resnet20", **SMALL).fit(paths, numbers)
    assert classifier.classes_.tolist() == [3, 7]
    assert set(classifier.predict(paths[:4]).tolist()) <= {3, 7}
    with pytest.raises(ValueError, match="40 images and y 3 labels"):
        classifier.fit(X, [0, 1, 0])


@pytest.mark.parametrize(
    "names", [["9", "10"], ["10", "9"], [10, 9], ["e\u0301", "f"], [2.0, 1.0], [True, False]], ids=str
)
def test_predictions_are_of_the_class_that_an_image_had(
    photos: tuple[NDArray[np.uint8], NDArray[Any]], names: list[Any]
) -> None:
    for number, image in enumerate(photos[0]):
        Image.fromarray(image).save(f"{number}.png")
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"scan": [f"{k}.png" for k in range(40)], "y": np.where(photos[1] == "dark", *names)})
    frame = frame.iloc[::-1]
    classifier = st.ImageClassifier("resnet20", **SMALL | {"epochs": 4})
    assert classifier.fit(frame[["scan"]], frame[["y"]]).score(frame.scan, frame.y) > 0.9
    assert classifier.classes_.tolist() == sorted(names) and Path(classifier.run_).is_absolute()


def test_three_grey_images_are_three(photos: tuple[NDArray[np.uint8], NDArray[Any]]) -> None:
    grey = photos[0][..., 0]
    classifier = st.ImageClassifier("resnet20", **SMALL | {"epochs": 1}).fit(grey, photos[1])
    assert len(classifier.predict(grey[:3])) == 3


@pytest.mark.slow
def test_cross_validation_trains_a_run_for_each_fold(photos: tuple[NDArray[np.uint8], NDArray[Any]]) -> None:
    scores = cross_val_score(st.ImageClassifier("resnet20", **SMALL), *photos, cv=2)
    assert len(scores) == 2 and len(list(Path("runs").iterdir())) == 2


def test_a_column_of_paths_is_a_list_of_images(photos: tuple[NDArray[np.uint8], NDArray[Any]]) -> None:
    pandas = pytest.importorskip("pandas")
    for number, image in enumerate(photos[0]):
        Image.fromarray(image).save(f"{number}.png")
    X = pandas.DataFrame({"path": [f"{number}.png" for number in range(40)], "age": range(40)})
    classifier = st.ImageClassifier("resnet20", **SMALL).fit(X, photos[1])
    assert (classifier.predict_proba(X[:3]) == classifier.predict_proba(X.path[:3])).all()

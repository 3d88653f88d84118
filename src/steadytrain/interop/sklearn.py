"""An estimator of scikit-learn: fine-tuning behind ``fit``, ``predict``, ``predict_proba`` and ``score``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

import steadytrain as st
from steadytrain.data.packing.memory import Samples, images_of
from steadytrain.data.sources.labels import classes_from_texts
from steadytrain.errors import DataError


def _images(X: Any) -> list[Any]:
    """List the images of X, of which an array or a list has several; of a DataFrame, those of its column."""
    X = X[X.columns[0]] if hasattr(X, "columns") and len(X.columns) == 1 else X
    several = images_of(X) if hasattr(X, "columns") else None
    return [image for image, _ in several] if isinstance(several, Samples) else list(X)


class ImageClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A fine-tuned image classifier as an estimator of scikit-learn, for pipelines, searches and cross-validation.

    ``X`` is a list of paths, of PIL images or of arrays, or an array [N, H, W] or [N, H, W, C]. Each fit is a run in a
    folder; the same fit again finds it finished.

    Args:
        model, epochs, lr, batch_size, size, train, weights, device, seed, progress: as of :func:`steadytrain.finetune`.
        pretrained: False: train from scratch, as :func:`steadytrain.train`.
        settings: further values of the recipe by their keys: ``{"optim.clip_norm": 1}``.
        run: the folder of the run; None: one for each fit, below ``runs``.

    Attributes:
        classes_: the labels that ``y`` had, sorted.
        run_: the folder of the run.
        metrics_: as of :class:`Outcome`, on the images that were held out.

    >>> random = np.random.default_rng(0)
    >>> X = np.concatenate([random.integers(low, low + 80, (20, 16, 16, 3)) for low in (0, 170)]).astype(np.uint8)
    >>> y = ["dark"] * 20 + ["light"] * 20
    >>> classifier = ImageClassifier("resnet20", pretrained=False, epochs=2, device="cpu").fit(X, y)
    >>> classifier.predict_proba(X[:3]).shape, classifier.classes_.tolist()
    ((3, 2), ['dark', 'light'])
    """

    def __init__(
        self,
        model: Any = None,
        *,
        pretrained: bool = True,
        epochs: float | None = None,
        lr: float | None = None,
        batch_size: int | None = None,
        size: int | None = None,
        train: str | None = None,
        weights: str | Path | None = None,
        device: str | None = None,
        seed: int | None = None,
        settings: Mapping[str, Any] | None = None,
        run: str | Path | None = None,
        progress: bool | None = None,
    ) -> None:
        self.model, self.pretrained, self.epochs, self.lr = model, pretrained, epochs, lr
        self.batch_size, self.size, self.train, self.weights = batch_size, size, train, weights
        self.device, self.seed, self.settings, self.run, self.progress = device, seed, settings, run, progress

    def fit(self, X: Any, y: ArrayLike) -> ImageClassifier:
        """Train on images and their classes. Raises SteadyError, which is a ValueError for what was given."""
        check_classification_targets(y)
        images, labels = _images(X), column_or_1d(y)
        self.classes_ = np.unique(labels)
        if len(images) != len(labels):
            raise DataError(f"X has {len(images)} images and y {len(labels)} labels: give a label for each image")
        names = ("epochs", "lr", "batch_size", "size", "train", "weights", "device", "seed")
        flags = {name: value for name in names if (value := getattr(self, name)) is not None}
        train = st.finetune if self.pretrained else st.train
        known: dict[str, Any] = {"model": self.model, "run": self.run, "progress": self.progress, **flags}
        result = train(list(zip(images, map(str, labels), strict=True)), self.settings, **known)
        self.run_, self.metrics_ = str(result.run.directory.resolve()), result.metrics
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probability of each class of ``classes_`` for each image: float64 [N, K]."""
        check_is_fitted(self)
        trained = st.restore(self.run_, model=self.model, device=self.device or "auto")
        columns = {name: number for number, name in enumerate(trained.classes)}
        rows = list[NDArray[np.float64]]()
        for prediction in st.predict(trained, _images(X), top=len(columns)).stream:
            if prediction.error is not None:
                raise DataError(f"image {len(rows)} cannot be predicted: {prediction.error}")
            rows.append(np.zeros(len(columns)))
            rows[-1][[columns[name] for name in prediction.classes]] = prediction.probabilities
        _, outputs = classes_from_texts(list(map(str, self.classes_)), classes=list(columns), where="y")
        return np.array(rows).reshape(-1, len(columns))[:, outputs]

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the likeliest class of each image: [N], of the type of ``y``."""
        check_is_fitted(self)
        labels: NDArray[Any] = self.classes_[self.predict_proba(X).argmax(1)]
        return labels

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array, tags.input_tags.string = False, True, True
        tags.no_validation = True  # a DataFrame's columns are no features
        return tags

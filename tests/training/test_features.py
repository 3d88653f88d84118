"""Features of images are what the network itself gives its classifier, in the images' order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import steadytrain as st
from steadytrain.errors import DataError


def _network(name: str) -> Any:
    return timm.create_model(name)


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Three images of different sizes."""
    noise = np.random.default_rng(0)
    paths = [tmp_path / f"{name}.png" for name in "cab"]
    for path, side in zip(paths, (70, 90, 160), strict=True):
        Image.fromarray(noise.integers(0, 256, (side, side, 3), np.uint8)).save(path)
    return paths


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_features_are_those_of_the_network_itself(photos: list[Path], tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    torch.save(_network(name).state_dict(), tmp_path / "w.pth")
    trained = st.restore(tmp_path / "w.pth", model=f"timm/{name}", device="cpu")
    found = st.features(trained, photos, batch_size=2)
    assert found.dtype == np.float32 and found.shape == (3, _network(name).num_features)
    network: Any = trained.module
    head = network.get_classifier()
    logits = torch.from_numpy(found) @ head.weight.float().T + head.bias
    expected = [prediction.classes[0] for prediction in st.predict(trained, photos, top=1)]
    assert [trained.classes[k] for k in logits.argmax(1).tolist()] == expected
    again = np.concatenate([st.features(trained, path) for path in photos])
    np.testing.assert_allclose(found, again, rtol=1e-4, atol=1e-4)


def test_an_image_that_cannot_be_read_is_named(photos: list[Path], tmp_path: Path) -> None:
    torch.save(_network("test_resnet").state_dict(), tmp_path / "w.pth")
    trained = st.restore(tmp_path / "w.pth", model="timm/test_resnet", device="cpu")
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.png"):
        st.features(trained, [*photos, tmp_path / "bad.png"])

"""The data that a command opens to choose its defaults are those that its run trains on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.seams.images import write_marks

from steadytrain.config import Data, Model
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError
from steadytrain.events import Noticed, Started
from steadytrain.run import Run
from steadytrain.training.data import OpenedData, open_named, side_to_pack
from steadytrain.training.loop.defaults import choose_recipe
from steadytrain.training.session.opening import open_session
from steadytrain.training.session.session import Session

SMALL = {"model.name": "mlp", "batch_size": 8, "parallel.device": "cpu", "budget.epochs": 1, "data.holdout": 0.2}


@contextmanager
def begun(folder: Path, data: Path, opened: OpenedData | None) -> Iterator[Session]:
    """The session of a new run on ``data``, without an update."""
    choice = choose_recipe(str(data), {}, SMALL, finetune=False, say=lambda line: None)
    choice.opened.close()
    run = Run.create(folder, choice.recipe())
    with run.lock(), run.log() as log, open_session(run, log, allow_import=False, opened=opened) as session:
        yield session


def test_a_run_takes_the_data_of_its_command_and_leaves_them_open(tmp_path: Path) -> None:
    photos = write_marks(tmp_path / "photos", 40)
    (tmp_path / "photos/class0").rename(tmp_path / "photos/7")  # a number among words: worth a line
    lines: list[str] = []
    choice = choose_recipe(str(photos), {}, SMALL, finetune=False, say=lines.append)
    with closing(choice.opened) as opened:
        with begun(tmp_path / "run", photos, opened) as session:
            assert session.data.train is opened.train
            noticed = [event.message for event in session.outbox if isinstance(event, Noticed)]
        assert len(opened.train.image(0)) > 0, "the next of several runs wants them"
        assert opened.remarks and set(opened.remarks) <= set(noticed), "the run's log tells what was skipped"
    assert set(opened.remarks) <= set(lines), "and so did the command, before it packed"


def test_a_run_of_other_data_opens_its_own_and_closes_them(tmp_path: Path) -> None:
    first, second = (write_marks(tmp_path / name, 40) for name in ("first", "second"))
    choice = choose_recipe(str(first), {}, SMALL, finetune=False, say=lambda line: None)
    with closing(choice.opened), begun(tmp_path / "run", second, choice.opened) as session:
        own: Records = session.data.train
        assert own is not choice.opened.train
    with pytest.raises(DataError, match="closed"):
        own.image(0)


def test_a_folder_is_packed_at_what_the_network_asks_for(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (500, 400), (number, 9, 99)).save(tmp_path / "photos" / name / f"{number}.jpg")
    photos = str(tmp_path / "photos")

    def side(model: str, begun: Started | None = None, **more: Any) -> int:
        data, network = Data(train=photos, **more), Model(model)
        with closing(open_named(data, network, begun=begun)) as opened:
            assert opened.suits(data, side_to_pack(data, network, begun))
            card = opened.train.card
            assert card is not None
            return card.height[0]

    assert side("timm/efficientnet_b4") == 366, "320 pixels of a crop that keeps seven eighths"
    assert side("timm/resnet50") == side("nowhere.at_all:net") == side("resnet20") == 256
    assert side("timm/resnet50", size=320) == 366
    rest: dict[str, Any] = {"digest": "", "steps": 1, "steps_per_epoch": 1, "batch_size": 1, "model": {}, "machine": {}}
    before, since = (Started(step=0, data=data, **rest) for data in ({}, {"shorter_side": 366}))
    assert side("timm/efficientnet_b4", before) == 256, "as version 0.2 packed it, which did not look at the network"
    assert side("timm/resnet50", since) == 366

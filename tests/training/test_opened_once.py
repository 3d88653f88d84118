"""The data that a command opens to choose its defaults are those that its run trains on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.seams.images import write_marks

from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError
from steadytrain.events import Noticed
from steadytrain.run import Run
from steadytrain.training.data import OpenedData
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

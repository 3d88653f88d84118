"""What says that a machine is about to be taken away: each cloud, a file; and who is asked."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.machine.clouds import Clouds, fake_clouds

from steadytrain.errors import InputError, RecipeError
from steadytrain.machine import notices
from steadytrain.machine.notices import (
    MachineNotice,
    MetadataService,
    NoticeWatch,
    ask_file,
    cloud_of,
    stop_reason,
    watching_notices,
)


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clouds]:
    with fake_clouds() as served:
        monkeypatch.setenv(notices.METADATA, served.address)
        monkeypatch.setattr(notices, "POLL_SECONDS", 0.05)
        yield served


def _azure(kind: str, **more: object) -> dict[str, object]:
    event = {"EventId": f"id-{kind}", "EventType": kind, "ResourceType": "VirtualMachine", "EventStatus": "Scheduled"}
    return {**event, "Resources": ["machine-1"], "NotBefore": "Thu, 26 Nov 2026 12:00:00 GMT", **more}


def test_aws_is_asked_with_a_token_and_says_when_the_machine_goes(clouds: Clouds) -> None:
    ask = MetadataService("aws", clouds.address).ask
    assert ask() == []
    clouds.spot = {"action": "terminate", "time": "2026-11-26T12:00:00Z"}
    (notice,) = ask()
    assert (notice.is_certain, notice.deadline) == (True, 1795694400.0)
    assert clouds.given == 1 and clouds.asked[0] == "PUT /latest/api/token"


def test_a_token_that_has_run_out_is_replaced(clouds: Clouds) -> None:
    ask = MetadataService("aws", clouds.address).ask
    ask()
    clouds.tokens.clear()
    clouds.spot = {"action": "stop", "time": "2026-11-26T12:00:00Z"}
    assert [notice.what for notice in ask()] == ["aws: this machine is stopped"]
    assert clouds.given == 2


def test_a_rebalance_recommendation_saves_and_goes_on(clouds: Clouds) -> None:
    clouds.rebalance = {"noticeTime": "2026-11-26T12:00:00Z"}
    said: list[str] = []
    watch, ask = NoticeWatch(said.append, lambda: 1.0), MetadataService("aws", clouds.address).ask
    watch.take(ask(), time.time())
    assert watch.wants_save and watch.notice is None
    watch.wants_save = False
    watch.take(ask(), time.time())
    assert not watch.wants_save and len(said) == 1


def test_google_answers_as_soon_as_it_preempts(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "POLL_SECONDS", 30.0)
    ask = MetadataService("gcp", clouds.address).ask
    threading.Timer(0.1, clouds.preempt).start()
    began = time.time()
    (notice,) = ask()
    assert notice.is_certain and notice.deadline is not None and 25 < notice.deadline - began < 60


@pytest.mark.parametrize(
    ("event", "num"),
    [("NONE", 0), ("MIGRATE_ON_HOST_MAINTENANCE", 0), ("TERMINATE_ON_HOST_MAINTENANCE", 1)],
)
def test_of_google_maintenance_only_a_stop_ends_the_run(clouds: Clouds, event: str, num: int) -> None:
    clouds.maintenance = event
    assert len(MetadataService("gcp", clouds.address).ask()) == num


@pytest.mark.parametrize(
    ("event", "num"),
    [
        (_azure("Preempt"), 1),
        (_azure("Terminate"), 1),
        (_azure("Reboot"), 1),
        (_azure("Redeploy"), 1),
        (_azure("Freeze"), 0),
        (_azure("Preempt", Resources=["machine-2"]), 0),
        (_azure("Reboot", EventStatus="Completed"), 0),
        (_azure("Unheard"), 0),
    ],
)
def test_azure_events_of_this_machine_alone_count(clouds: Clouds, event: dict[str, object], num: int) -> None:
    clouds.events = [event]
    found = MetadataService("azure", clouds.address).ask()
    assert len(found) == num
    assert all(notice.deadline == 1795694400.0 for notice in found)


def test_a_file_is_a_notice_and_may_say_when(tmp_path: Path) -> None:
    path, since = tmp_path / "notice", time.time() - 5
    ask = ask_file(path, since)
    assert ask() == []
    path.write_text("90\n")
    (notice,) = ask()
    assert notice.is_certain and notice.deadline == pytest.approx(path.stat().st_mtime + 90)
    path.write_text("2026-11-26T12:00:00Z")
    assert ask()[0].deadline == 1795694400.0
    path.write_text("")
    assert ask()[0].deadline is None
    os.utime(path, (since - 60, since - 60))
    assert ask() == []


def test_a_restart_in_a_quarter_of_an_hour_does_not_end_the_run_yet() -> None:
    said: list[str] = []
    watch = NoticeWatch(said.append, lambda: 2.0)
    reboot = MachineNotice(id="a", what="azure: this machine is restarted", deadline=900.0)
    watch.take([reboot], 0.0)
    assert watch.notice is None and said == [
        "azure: this machine is restarted in 15 min 00 s: the run continues until 3 min 00 s before"
    ]
    watch.take([reboot], 700.0)
    assert watch.notice is None and len(said) == 1
    watch.take([], 710.0)  # taken back
    watch.take([reboot], 721.0)
    assert watch.notice == reboot
    slow = NoticeWatch(said.append, lambda: 200.0)  # what takes long to save has to begin earlier
    slow.take([reboot], 500.0)
    assert slow.notice == reboot


@pytest.mark.parametrize(
    ("save", "left", "words"),
    [
        (1.5, 118.0, "in 118 s: saving and stopping (a checkpoint takes 1.50 s)"),
        (150.0, 118.0, "a checkpoint takes 2 min 30 s: it may not be whole in time, and the newest whole one counts"),
        (0.0, 118.0, "how long a checkpoint takes is not known yet"),
    ],
)
def test_whether_a_checkpoint_fits_is_told_with_the_notice(save: float, left: float, words: str) -> None:
    assert words in stop_reason(MachineNotice(id="a", what="aws: terminated", deadline=left), 0.0, save)


def _wait_until(holds: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    assert holds()


def test_one_thread_asks_and_ends_with_the_run(clouds: Clouds) -> None:
    said: list[str] = []
    before = threading.active_count()
    with watching_notices("aws", say=said.append, save_seconds=lambda: 200.0, began=0.0) as watch:
        mine = [thread for thread in threading.enumerate() if thread.name == "steady-notices"]
        assert len(mine) == 1 and watch.notice is None
        _wait_until(lambda: len(said) == 2)
        clouds.spot = {"action": "terminate", "time": "2099-01-01T00:00:00Z"}
        _wait_until(lambda: len(said) == 3)
        clouds.spot = {"action": "terminate", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        _wait_until(lambda: watch.notice is not None)
    assert not mine[0].is_alive() and threading.active_count() <= before + 3  # those that the server answers by
    assert said[0] == f"notices: aws at {clouds.address} is asked every 0 s whether this machine is taken away"
    assert said[1].startswith("a checkpoint takes 3 min 20 s, and aws warns 120 s before it takes a machine away")


def test_the_end_does_not_wait_for_an_answer(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "POLL_SECONDS", 50.0)
    with watching_notices("gcp", say=lambda text: None, save_seconds=lambda: 0.0, began=0.0):
        _wait_until(lambda: any("wait_for_change" in path for path in clouds.asked))
        began = time.monotonic()
    assert time.monotonic() - began < 20


def test_a_service_that_does_not_answer_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_clouds() as gone:
        monkeypatch.setenv(notices.METADATA, gone.address)
    monkeypatch.setattr(notices, "ERROR_SECONDS", 0.01)
    said: list[str] = []
    with watching_notices("azure", say=said.append, save_seconds=lambda: 0.0, began=0.0) as watch:
        _wait_until(lambda: len(said) == 2)
        time.sleep(0.05)
    assert watch.notice is None and len(said) == 2
    assert "if this machine is taken away, there is no warning" in said[1]


@pytest.mark.parametrize("spot", [{"action": "terminate"}, {"action": "x", "time": "soon"}])
def test_an_answer_without_a_time_still_ends_the_run(clouds: Clouds, spot: dict[str, str]) -> None:
    clouds.spot = spot
    assert [(notice.is_certain, notice.deadline) for notice in MetadataService("aws", clouds.address).ask()] == [
        (True, None)
    ]


def test_answers_that_are_none_are_errors_of_asking(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(text: str) -> Callable[..., tuple[int, str]]:
        return lambda *_, **__: (200, text)

    for text in ("", "[]", "[" * 100_000, "<html>"):
        service = MetadataService("aws", clouds.address)
        monkeypatch.setattr(service, "request", answers(text))
        with pytest.raises((OSError, http.client.HTTPException, ValueError)):
            service.ask()


def test_nothing_is_asked_unless_somebody_says_so(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(notices.VARIABLE, raising=False)
    with watching_notices(None, say=lambda text: None, save_seconds=lambda: 0.0, began=0.0):
        assert not [thread for thread in threading.enumerate() if thread.name == "steady-notices"]
    assert clouds.asked == []


def test_the_variable_of_a_machine_names_its_source(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notices.VARIABLE, "aws")
    with watching_notices(None, say=lambda text: None, save_seconds=lambda: 0.0, began=0.0):
        _wait_until(lambda: clouds.given)
    monkeypatch.setenv(notices.VARIABLE, "ibm")
    with (
        pytest.raises(InputError, match="STEADYTRAIN_NOTICES is 'ibm'; it must be aws, gcp, azure, auto or file:PATH"),
        watching_notices(None, say=lambda text: None, save_seconds=lambda: 0.0, began=0.0),
    ):
        pass


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        (
            {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
            "azure",
        ),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "0000"}, None),
        ({}, None),
    ],
)
def test_auto_asks_the_cloud_that_the_machine_names(tmp_path: Path, files: dict[str, str], cloud: str | None) -> None:
    folder = tmp_path / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    assert cloud_of(tmp_path) == cloud
    if cloud is None:
        said: list[str] = []
        with watching_notices("auto", say=said.append, save_seconds=lambda: 0.0, began=0.0, root=tmp_path):
            assert not [thread for thread in threading.enumerate() if thread.name == "steady-notices"]
        assert said == ["notices: auto: this machine's DMI tables name none of aws, gcp and azure: nothing is asked"]


@pytest.mark.parametrize("address", ["169.254.169.254", "https://127.0.0.1:1", "http://[a", ""])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="STEADYTRAIN_METADATA is"):
        MetadataService("aws", address)


def test_a_source_that_is_none_is_refused() -> None:
    from steadytrain.config.parts import Every

    with pytest.raises(RecipeError, match=r"every.notices is 'ibm'; it must be aws, gcp, azure, auto or file:PATH"):
        Every(notices="ibm")

"""The live page's server: whom it answers, what it lets a page do, and that events arrive, once each."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.reports.measured_runs import Attempt, line, measured
from tests.reports.runs import logged, recipe, started

from steadytrain.errors import InputError
from steadytrain.events import Noticed
from steadytrain.reports import live
from steadytrain.reports.live import listening, make_server
from steadytrain.reports.run_list import RunRow
from steadytrain.run import Run

EVIL = "<img src=x onerror=alert(1)>"


@contextlib.contextmanager
def serving(shown: Run | Path, port: int = 0, **more: Any) -> Iterator[int]:
    """The port of a server of the page of a run, or of a folder."""
    server = make_server(shown, **more)
    with listening(port) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(60)


def asked(port: int, path: str = "/", **headers: str) -> http.client.HTTPResponse:
    """The answer to a request as a browser makes it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


@dataclass(frozen=True)
class Told:
    """One server-sent event."""

    kind: str
    name: str
    data: Any


def events(port: int, path: str = "/events", **headers: str) -> Generator[Told, None, None]:
    """Server-sent events as they come."""
    answer = asked(port, path, **headers)
    assert answer.getheader("content-type", "").startswith("text/event-stream")
    held: dict[str, str] = {}
    while text := answer.readline().decode():
        key, _, value = text.rstrip("\n").partition(": ")
        if key:
            held[key] = value
        elif held.get("event"):
            yield Told(held["event"], held.get("id", ""), json.loads(held["data"]))
            held = {}


def stream(port: int, count: int, path: str = "/events", **headers: str) -> list[Told]:
    """The first so many events."""
    with contextlib.closing(events(port, path, **headers)) as messages:
        return list(itertools.islice(messages, count))


def first(port: int, kind: str, **headers: str) -> Told:
    """The first event of a kind."""
    with contextlib.closing(events(port, **headers)) as messages:
        return next(message for message in messages if message.kind == kind)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has ended, with a GPU."""
    return measured(tmp_path, steps=400, gpus=1)


def test_only_who_asks_for_this_machine_by_name_is_answered(run: Run) -> None:
    with serving(run) as port:
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:9999", "LOCALHOST"):
            assert asked(port, Host=host).status == 200, "through a tunnel the port is another"
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "",
            "[::1]:80",
            "localhost:80:80",
        ):
            for path in ("/", "/events", "/live.js"):
                answer = asked(port, path, Host=host)
                assert answer.status == 403
                assert "measured" not in answer.read().decode()


def test_pages_of_other_sites_are_refused_and_links_to_it_followed(run: Run) -> None:
    with serving(run) as port:
        for site in ("cross-site", "same-site"):
            for path in ("/", "/events", "/live.js"):
                for mode in ("no-cors", "cors", "websocket"):
                    answer = asked(port, path, Sec_Fetch_Site=site, Sec_Fetch_Mode=mode)
                    assert answer.status == 403 and b"pages of other sites are refused" in answer.read()
            assert asked(port, Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate").status == 200
        for site in ("same-origin", "none"):
            assert asked(port, "/live.js", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors").status == 200


def test_the_page_may_run_its_own_scripts_and_nothing_else(run: Run) -> None:
    with serving(run) as port:
        for path in ("/", "/live.js", "/plotly.js", "/events", "/nothing-here"):
            policy = asked(port, path).getheader("content-security-policy") or ""
            assert "default-src 'none'" in policy
            assert re.search(r"script-src 'self';", policy)
            assert "frame-ancestors 'none'" in policy
        assert asked(port, "/nothing-here").status == 404
        page = asked(port).read().decode()
    assert not re.search(r"(src|href)=\"https?:", page), "works without a network"
    scripts = re.findall(r"<script([^>]*)>", page)
    assert [script for script in scripts if "src=" not in script] == [' type="application/json" id="told"']


def test_it_listens_on_this_machine_alone(run: Run) -> None:
    with listening(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_told_in_a_line_and_without_a_wish_another_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port} is not available .*choose another --port"):
            listening(port)
    with pytest.raises(InputError, match="--port is 70000"):
        listening(70000)
    with listening() as first, listening() as other:
        assert first.getsockname()[1] != other.getsockname()[1]


def test_a_browser_is_sent_everything_once_and_then_what_is_new(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "growing", recipe())
    attempt = Attempt(1_790_000_000.0, steps=1055)
    lines = [line(event, attempt.now) for event in attempt.events()]
    path = run.directory / "events.jsonl"
    path.write_text("".join(lines[:300]), encoding="utf-8")
    with serving(run) as port:
        everything = first(port, "all")
        assert len(everything.data["train"]) == sum('"Logged"' in line for line in lines[:300])
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines[300:500])
        more = first(port, "more", Last_Event_ID=everything.name)
        assert len(more.data["train"]) == sum('"Logged"' in line for line in lines[300:500])
        again = stream(port, 2, path=f"/events?after={more.name}")
        assert {message.kind for message in again} == {"account", "state"}, "whoever has all points is sent none"
        strange = stream(port, 1, Last_Event_ID="another.server.7")
        assert strange[0].kind == "all"


def test_steps_that_a_restart_took_back_leave_the_curves(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "restarted", recipe())
    path = run.directory / "events.jsonl"
    began = 1_790_000_000.0
    steps = [line(logged(number), began + number) for number in range(20, 220, 20)]
    path.write_text(line(started(), began) + "".join(steps), encoding="utf-8")
    with serving(run) as port:
        before = first(port, "all")
        assert [row[2] for row in before.data["train"]] == list(range(20, 220, 20))
        with path.open("a", encoding="utf-8") as file:
            file.write(line(started(100), began + 3600, attempt=2) + line(logged(120), began + 3620, attempt=2))
        again = first(port, "all", Last_Event_ID=before.name)
        assert [row[2] for row in again.data["train"]] == [20, 40, 60, 80, 100, 120]
        assert again.data["train"][-1][0] == pytest.approx(200 + 20, abs=1), "the pause is not in the run's own time"


def test_a_long_run_is_thinned_and_keeps_its_spikes(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "long", recipe())
    began = 1_790_000_000.0
    lines = [line(logged(number, loss=99.0 if number == 7777 else 1.0), began + number) for number in range(1, 12_000)]
    (run.directory / "events.jsonl").write_text(line(started(), began) + "".join(lines), encoding="utf-8")
    with serving(run) as port:
        sent = first(port, "all")
    rows = sent.data["train"]
    assert len(rows) <= 4000
    assert 99.0 in [row[3] for row in rows]
    assert [row[2] for row in rows] == sorted(row[2] for row in rows)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "later", recipe())
    with serving(run) as port:
        by_kind = {message.kind: message for message in stream(port, 3)}
        assert by_kind["state"].data["status"] == "waiting"
        assert by_kind["all"].data == {}
        measured(tmp_path, "later", steps=100)
        assert first(port, "more", Last_Event_ID=by_kind["all"].name).data["train"]
        assert first(port, "state").data["status"] == "finished"
        assert first(port, "account").data["verdict"]["sentence"]


def test_names_and_messages_are_data_and_never_markup(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "<b>evil</b><script>alert(1)<|script>", recipe())
    with (run.directory / "events.jsonl").open("w", encoding="utf-8") as file:
        file.write(line(started(), 1_790_000_000.0))
        file.write(line(Noticed(message=f"{EVIL}\r\n\r\nevent: state\ndata: 1"), 1_790_000_001.0))
    with serving(run) as port:
        page = asked(port).read().decode()
        messages = stream(port, 3)
    assert "<b>evil" not in page
    assert "&lt;b&gt;evil" in page
    assert [message.kind for message in messages] == ["all", "account", "state"], (
        "a message cannot make events of its own"
    )
    assert any(EVIL in happening["what"] for happening in messages[1].data["happened"])


def test_stopping_ends_the_streams_that_are_open(run: Run) -> None:
    with serving(run) as port:
        answer = asked(port, "/events")
        assert answer.readline()
    rest = answer.read()  # to its end, which comes
    assert rest.endswith(b"\n")


def test_more_pages_than_there_may_be_are_refused_until_one_is_closed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS", 2)
    with serving(run) as port:
        first_page, second = events(port), events(port)
        assert next(first_page) and next(second)
        refused = asked(port, "/events")
        assert (refused.status, refused.getheader("retry-after")) == (503, "5")
        assert b"2 pages of this run are open" in refused.read()
        assert asked(port).status == 200, "the page itself comes"
        first_page.close()
        end = time.monotonic() + 60
        while (answer := asked(port, "/events")).status != 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        answer.close()
        second.close()


def listed(port: int) -> dict[str, Any]:
    """The rows of the page of a folder, by the runs' names, once they have been read."""
    while (document := json.loads(asked(port, "/runs.json").read()))["reading"]:
        pass
    return {row["run"]: row for row in document["rows"]}


def test_the_page_of_a_run_may_be_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "r\udce9ves"  # names in Latin-1
    folder.mkdir()
    run = measured(folder, "caf\udce9", steps=100)
    with serving(run) as port:
        page = asked(port)
        assert page.status == 200 and "caf?" in page.read().decode()
    with serving(folder) as port:
        (row,) = listed(port).values()
        assert "r?ves" in asked(port).read().decode()
        assert asked(port, f"/run/{row['key']}/").status == 200


def test_the_page_of_a_folder_lists_its_runs_and_leads_to_each(tmp_path: Path) -> None:
    for name in ("a", EVIL.replace("/", "")):
        run = Run.create(tmp_path / name, recipe())
        with run.log() as log:
            log.append(started())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "recipe.json").write_text("{")
    with serving(tmp_path) as port:
        page = asked(port)
        assert page.status == 200 and "script-src 'self'" in page.getheader("content-security-policy", "")
        assert EVIL not in page.read().decode()
        rows = listed(port)
        assert rows.keys() == {"a", "b", EVIL.replace("/", "")} and rows["b"]["status"] == "damaged"
        assert rows["b"]["key"] == ""
        place = f"/run/{rows['a']['key']}/"
        assert "All runs" in asked(port, place).read().decode()
        kinds = {event.kind for event in stream(port, 3, f"{place}events") if event.kind != "reading"}
        assert kinds <= {"all", "account", "state"} and kinds
        for path in ("/run/../../etc/passwd", "/run/0/", f"{place}recipe.json", place[:-1], "/events"):
            assert asked(port, path).status == 404
        assert asked(port, "/runs.json", Host="evil.example").status == 403


def test_runs_of_one_data_set_stand_together_the_best_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"a": ("cats", 0.7), "b": ("signs", 0.9), "c": ("cats", 0.8), "d": ("signs", 0.6), "e": ("signs", None)}
    rows = [
        RunRow(name=name, directory=name, status="finished", data=data, best=best)
        for name, (data, best) in scores.items()
    ]
    monkeypatch.setattr(live, "list_runs", lambda folder: rows)
    with serving(tmp_path) as port:
        assert [*listed(port)] == ["b", "d", "e", "c", "a"]


def test_the_page_of_a_folder_shows_runs_as_they_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.01)
    with serving(tmp_path) as port:
        assert listed(port) == {}
        assert "holds none yet" in json.loads(asked(port, "/runs.json").read())["error"]
        Run.create(tmp_path / "a", recipe())
        while "a" not in listed(port):
            pass

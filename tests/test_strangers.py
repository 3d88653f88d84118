"""What a recipe that was read from a file may not do by itself: a row of the table, a test."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from steadytrain.cli import main
from steadytrain.cli.console import Console
from steadytrain.config import Budget, Data, Model, Recipe
from steadytrain.config.strangers import GATES, Gate
from steadytrain.cost.prices import known_price
from steadytrain.data.recordio.reader import Records
from steadytrain.data.results.predictions import read_label_predictions, read_predictions, require_writable
from steadytrain.data.storage.pages import PagedFile, origin_path, pages_path
from steadytrain.data.storage.remote_file import is_remote_file
from steadytrain.data.storage.store import ObjectFacts, _web_client
from steadytrain.errors import DataError, RecipeError, RunError
from steadytrain.events import Evaluated, Event
from steadytrain.format import fit_table, text_table
from steadytrain.machine import web
from steadytrain.run import Run
from steadytrain.training.data import open_data

RECIPE = Recipe(data=Data(train="a.rec"), model=Model("mlp"), budget=Budget(epochs=1))
VALUES = {
    "model.name": "pkg.mod:net",
    "optim.name": "pkg.mod:optimizer",
    "optim.loss": "pkg.mod:loss",
    "data.transforms": ["pkg.mod:transform"],
    "model.weights": "/weights.pth",
    "model.pretrained": True,
    "every.upload": "s3://bucket/run",
    "every.notices": "aws",
}
PLACES = [gate for gate in GATES if gate.part == "data" and gate.key != "transforms"]
INNER = "http://169.254.169.254/latest/x.rec"


def test_the_page_has_the_rows_of_the_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "trust.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (.*) \| (.*) \|$", page, re.M)
    assert [Gate(*row) for row in rows] == list(GATES)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate.part}.{gate.key} {gate.does.split()[-1]}")
def test_a_value_of_a_file_is_known_as_one_until_the_command_names_it(gate: Gate) -> None:
    name = f"{gate.part}.{gate.key}"
    value = VALUES.get(name, INNER)
    more = {"parallel.engine": "async"} if gate.part == "parallel" else {}
    named = RECIPE.with_({name: value, **more})
    assert gate.key not in getattr(named, gate.part).from_file
    read = Recipe.from_json(named.to_json())
    assert gate.key in getattr(read, gate.part).from_file
    assert gate.key in getattr(read.with_(seed=3), gate.part).from_file
    assert gate.key not in getattr(read.with_({name: value}), gate.part).from_file


@pytest.mark.parametrize("gate", PLACES, ids=lambda gate: gate.key)
def test_an_address_of_this_machine_in_a_file_is_not_asked(gate: Gate) -> None:
    name = f"data.{gate.key}"
    read = Recipe.from_json(RECIPE.with_({name: INNER}).to_json())
    message = rf"^{name} of the recipe file leads to {INNER}, .*; to read it, add --set {name}={INNER}$"
    with pytest.raises(RecipeError, match=message):
        open_data(read.data, seed=0)


def test_several_sources_of_a_file_are_each_looked_at(tmp_path: Path) -> None:
    values = {**RECIPE.to_dict(), "data": {"train": f"{tmp_path}/a.rec,{INNER}"}}
    with pytest.raises(RecipeError, match="leads to http://169"):
        open_data(Recipe.from_json(json.dumps(values)).data, seed=0)


def test_a_run_names_what_it_reads_outside_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("linked").symlink_to(tmp_path)
    Path("a.json").touch()  # a path that is not here is sought in the folders above the run, up to that of all users
    values = {"data.train": "linked/x.rec", "data.val": f"{tmp_path}/here/val.rec", "data.root": "../photos"}
    values |= {"data.labels": "s3://bucket/labels.csv", "data.classes": "a.json", "model.weights": "/etc/weights.pth"}
    named = RECIPE.with_(values)
    Run.create("run", named)
    run = Run.open("run")
    assert run.outside_notice() == (
        "this run reads data outside the current folder: the weights file /etc/weights.pth, linked/x.rec,"
        " data.root ../photos, data.labels s3://bucket/labels.csv"
    )
    assert "/etc/weights.pth" not in run.outside_notice("data"), "what only opens the data reads no weights"
    assert not Run(run.directory, named).outside_notice(), "the command names them"
    network = Recipe.from_json(RECIPE.with_({"model.name": "mxnet:/etc/resnet"}).to_json())
    assert Run(run.directory, network).outside_notice().endswith(": model.name mxnet:/etc/resnet")


def test_a_resumed_run_says_what_it_reads_elsewhere_before_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here" / "photos").mkdir(parents=True)
    (tmp_path / "val.rec").touch()
    monkeypatch.chdir(tmp_path / "here")
    Run.create("run", RECIPE.with_({"data.train": "../val.rec"}))
    Path("theirs.toml").write_text('[data]\nval = "../val.rec"\n[model]\nname = "mlp"\n')
    for words, notice in (
        (["resume", "run"], "this run reads data outside the current folder: ../val.rec"),
        (
            ["train", "photos", "--recipe", "theirs.toml"],
            "the recipe file reads data outside the current folder: data.val",
        ),
    ):
        assert main(words) == 2
        first, *rest = capsys.readouterr().err.splitlines()
        assert first.startswith(notice) and rest


def test_records_that_claim_to_be_an_object_of_a_store_are_an_ordinary_file(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "x.rec"
    mine.write_bytes(bytes(70_000))
    PagedFile.create(theirs, INNER, ObjectFacts(size=70_000, etag="a", modified=""))
    for place in (theirs, tmp_path / "linked.rec"):
        if place != theirs:
            place.symlink_to(mine)
            for companion in (origin_path, pages_path):
                companion(place).hardlink_to(companion(theirs))
        assert not is_remote_file(place)
        with pytest.raises(DataError, match=re.escape(str(place))):
            Records.open(place)
    assert mine.read_bytes() == bytes(70_000)


@pytest.mark.parametrize("key", ["train", "val", "root", "labels"])
def test_a_link_that_leads_to_itself_is_told_in_one_line(key: str, tmp_path: Path, digits_folder: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    values = {"data.train": str(digits_folder), f"data.{key}": str(tmp_path / "loop")}
    with pytest.raises(DataError):
        open_data(Recipe.from_json(RECIPE.with_(values).to_json()).data, seed=0)


@pytest.mark.parametrize(
    "words",
    [
        ["sweep", "digits.rec", "--model", "mlp", "--epochs", "1", "--over", "lr=0.05", "--run", "s"],
        ["bench", "train", "--model", "mlp", "--batch-size", "8", "--threads", "1", "2", "--seconds", "0.1"],
        ["pack", "images", "p", "--workers", "2"],
        ["doctor"],
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                ["scale", "digits.rec", "--model", "mlp", "--batch-size", "32", "--seconds", "0.1", "--procs", "2"],
                ["train", "digits.rec", "--model", "mlp", "--epochs", "1", "--procs", "2", "--run", "r"],
                ["bandwidth", "--model", "mlp", "--seconds", "0.1", "--procs", "2"],
                ["launch", "--procs", "2", "--", "train", "digits.rec", "--model", "mlp", "--epochs", "1"],
                ["tune", "digits.rec", "--model", "mlp", "--minutes", "0.2"],
            )
        ),
    ],
    ids=lambda words: words[0],
)
def test_no_child_imports_what_lies_in_the_working_folder(
    words: list[str], tmp_path: Path, digits: Path, digits_folder: Path
) -> None:
    for name in ("steadytrain", "numpy", "torch", "json", "random", "socket", "multiprocessing", "importlib", "yaml"):
        (tmp_path / f"{name}.py").write_text(f"open('imported', 'a').write('{name} '); raise ImportError('{name}')")
    for suffix in (".rec", ".idx", ".json"):
        (tmp_path / f"digits{suffix}").symlink_to(digits.with_suffix(suffix))
    (tmp_path / "images").symlink_to(digits_folder)
    command = [sys.executable, "-P", "-m", "steadytrain", *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert ended.returncode in (0, 1 if words[0] == "doctor" else 0), ended.stderr


def test_a_name_in_a_table_makes_no_line_of_its_own() -> None:
    rows = [["run", "best"], ["a\nsteady: all is well\x1b[2J", "91 %\r"]]
    assert text_table(rows).splitlines()[1].split() == ["a", "steady:", "all", "is", "well?[2J", "91", "%"]
    assert fit_table(rows, 12).splitlines() == ["run", "  best", "a steady: all is well?[2J", "  91 %"]


SWEPT = {
    "every.upload": "the run is sent to a store",
    "every.track": "the run is sent to a service",
    "every.notices": "a cloud's metadata, or a file, is asked",
    "data.val": "leads to http://169.254.169.254/latest/x.rec",
    "data.transforms": "names the code pkg.mod:factory",
    "optim.loss": "names the code pkg.mod:factory",
}


@pytest.mark.parametrize("key", SWEPT)
def test_a_sweep_of_a_file_varies_nothing_that_leads_out(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = {"data.val": INNER, "data.transforms": ["vflip", "pkg.mod:factory"]}.get(key, "pkg.mod:factory")
    file = tmp_path / "recipe.toml"
    part, _, name = key.partition(".")
    tables = [
        f"[sweep.over]\n{json.dumps(key)} = {json.dumps([value])}\n",
        f"[sweep.over]\n{part} = [{{ {name} = {json.dumps(value)} }}]\n",
        f"[sweep.cases.a]\n{key} = {json.dumps(value)}\n",
    ]
    for table in tables:
        file.write_text(table)
        assert main(["sweep", str(file), "nowhere", "--run", str(tmp_path / "sweep")]) == 2
        assert SWEPT[key] in capsys.readouterr().err


def test_the_price_that_a_recipe_names_is_looked_up_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "socket")
    read = Recipe.from_json(RECIPE.with_({"parallel.price": "p3.2xlarge"}).to_json())
    assert known_price(read.parallel.price)


def test_a_sweep_writes_through_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").symlink_to(tmp_path / "mine")
    assert main(["sweep", "nowhere", "--over", "lr=0.1", "--run", str(tmp_path / "sweep")]) == 2
    assert "sweep.json is a link" in capsys.readouterr().err and not (tmp_path / "mine").exists()


@pytest.mark.parametrize("name", ["recipe.json", "events.jsonl", "lock"])
def test_a_pipe_in_a_run_keeps_no_command_waiting(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", RECIPE)
    (run.directory / name).unlink(missing_ok=True)
    os.mkfifo(run.directory / name)
    assert main(["resume", str(run.directory)]) == 2
    assert "it is a pipe" in capsys.readouterr().err or name == "lock"
    assert main(["runs", str(tmp_path)]) == 0
    if name == "lock":
        assert not run.is_held() and run.holder() is None
        with pytest.raises(RunError, match="lock is a pipe, not a file: remove it"), run.lock():
            pass


@pytest.fixture
def packed(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the digits, and a run that has ended."""
    for suffix in (".rec", ".idx", ".json"):
        shutil.copy(digits.with_suffix(suffix), tmp_path / f"a{suffix}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words", "code", "says"),
    [
        ("a.idx", ["check", "a.rec"], 1, "a.idx"),
        ("a.json", ["check", "a.rec"], 1, "it is a pipe"),
        ("names.txt", ["predict", "w.safetensors", "a.png", "--classes", "names.txt"], 2, "names.txt: it is a pipe"),
        ("w.pth", ["train", "a.rec", "--model", "mlp", "--weights", "w.pth", "--run", "r"], 2, "w.pth: it is a pipe"),
        ("w.safetensors", ["predict", "w.safetensors", "a.png"], 1, "it is a pipe"),
    ],
)
def test_a_pipe_in_place_of_a_file_keeps_no_command_waiting(
    name: str, words: list[str], code: int, says: str, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (packed / name).unlink(missing_ok=True)
    os.mkfifo(packed / name)
    assert main(words) == code
    output = capsys.readouterr()
    assert says in output.out + output.err and "Did you mean w.pth" not in output.err


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("unlink", "r/events.jsonl was removed while the run trained: run the same command again"),
        ("rename", "there is no folder r any more, or yet: put it there and run the same command again"),
    ],
)
def test_a_run_that_is_taken_away_while_it_trains_is_told_so_and_a_launcher_starts_it_again(
    does: str, says: str, packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = Console.show

    def take_away(console: Console, event: Event) -> None:
        if isinstance(event, Evaluated) and event.epoch < 1.5:
            Path("r/events.jsonl").unlink() if does == "unlink" else Path("r").rename("s")
        show(console, event)

    monkeypatch.setattr(Console, "show", take_away)
    words = ["train", "a.rec", "--model", "mlp", "--epochs", "2", "--seed", "1"]
    assert main([*words, "--run", "r"]) == 1
    assert says in capsys.readouterr().err
    monkeypatch.setattr(Console, "show", show)
    if does == "rename":
        Path("s").rename("r")
    assert main([*words, "--run", "r"]) == 0
    assert main([*words, "--run", "whole"]) == 0
    assert Path("r/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_predictions_that_are_no_file_keep_no_report_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "predictions.csv"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    for read in (lambda: next(read_predictions(path)), lambda: read_label_predictions(path)):
        with pytest.raises(DataError, match=f"predictions.csv: it is a {kind}$"):
            read()
    with pytest.raises(OSError, match=f"it is a {kind}"):
        require_writable(path)


@pytest.mark.parametrize("verb", ["train", "finetune", "tune", "schedule", "sweep"])
def test_the_data_of_a_recipe_file_are_judged_before_anything_is_asked(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "theirs.toml"
    file.write_text(f'[data]\ntrain = "{INNER}"\n[model]\nname = "mlp"\n')
    more = ["--over", "lr=0.1", "--run", str(tmp_path / "s")] if verb == "sweep" else []
    assert main([verb, *([str(file)] if verb == "sweep" else ["--recipe", str(file)]), *more]) == 2
    assert f"data.train of the recipe file leads to {INNER}," in capsys.readouterr().err


def test_passwords_in_addresses_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    uris = ["https://me:s3cr3t@example.org/x", "https://s3cr3t@example.org:8443/x", "ftp://me:s3@cr3t@example.org/x"]
    for uri in uris:
        for words in (
            ["fetch", uri],
            ["fetch", "mnist", "--mirror", uri],
            ["cost", "prices", "--refresh", uri],
            ["check", uri],
            ["train", uri],
            ["predict", "w.safetensors", uri],
        ):
            assert main(words) in (1, 2)
            output = capsys.readouterr()
            assert "cr3t" not in output.err + output.out, words


PORT = 8702
INNER_SPELLINGS = [
    *(
        f"http://{host}:{PORT}/a.rec"
        for host in ("127.0.0.1", "localhost", "LOCALHOST.", "127.1", "127.0.1", "0", "0.0.0.0")
    ),
    *(f"http://{host}:{PORT}/a.rec" for host in ("2130706433", "0x7f000001", "0x7f.1", "017700000001", "0177.0.0.01")),
    *(
        f"http://{host}:{PORT}/a.rec"
        for host in ("[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[fe80::1%25lo]")
    ),
    *(
        f"http://{host}/a.rec"
        for host in ("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[0:0:0:0:0:ffff:a9fe:a9fe]", "[::1")
    ),
    *(
        f"http://{host}/a.rec"
        for host in ("10.1.2.3", "192.168.0.1", "169.254.169.254", "100.100.100.200", "192.0.0.192")
    ),
    *("http://168.63.129.16/machine", "HTTPS://127.0.0.1/a.rec", "http:///a.rec", "http://printer/a.rec"),
    # Names: of the machine, of clouds and clusters, and of anybody's that lead here.
    *(
        f"http://{host}/a.rec"
        for host in ("localhost.localdomain", "metadata.google.internal", "kubernetes.default.svc")
    ),
    *(
        f"http://{host}/a.rec"
        for host in ("a.default.svc.cluster.local", "fritz.box", "wiki.corp", "nas.lan", "a.intranet")
    ),
    *(
        f"http://{host}/a.rec"
        for host in ("localtest.me", "127.0.0.1.nip.io", "mixed.example.com", "nowhere.example.com")
    ),
    # Other signs, which one program reads as another does not.
    *(
        "http://metadata.google\u3002internal/a.rec",
        "http://\uff4c\uff4fcalhost/a.rec",
        "http://\u24db\u24deca\u24dbhost/a.rec",
    ),
    *(
        "http://127\uff0e0\uff0e0\uff0e1/a.rec",
        "http://127.0.0.\u2460/a.rec",
        "http://127%2e0.0.1/a.rec",
        "http://loc\u00adalhost/a",
    ),
    *("http://8.8.8.8\\@127.0.0.1/a.rec", "http://127.0.0.1\\.8.8.8.8/a.rec", "http://8.8.8.8@127.0.0.1/a.rec"),
    *("http://127.0.0.1#.8.8.8.8/a.rec", "http://127.0.0.1?.8.8.8.8/a.rec", "http://127.0.0.1;8.8.8.8/a.rec"),
    *("http://127.0.0.1\t/a.rec", "http://8.8.8.8 127.0.0.1/a.rec", "http://127.0.0.[1]/a.rec"),
    # Braces, which stand for several.
    *(
        f"http://127.0.0.{{1,1}}:{PORT}/a.rec",
        f"http://{{127.0.0.1,localhost}}:{PORT}/a.rec",
    ),
    *(
        "http://{8.8.8.8,127.0.0.1}/a.rec",
        "http://{127.0.0.1:8702,evil.example.com:8702}/a.rec",
        "http://127.0.{0..1}.1/a.rec",
    ),
    *("http://{169.254.169.254,169.254.169.254}/latest/x.rec", "a.rec,http://127.0.0.1/a.rec"),
]
"""Most are of public lists of what passes filters of addresses."""


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names of the internet and their addresses, of which 127.0.0.2 counts as public; no proxy."""
    names = {"localtest.me": ["127.0.0.1"], "127.0.0.1.nip.io": ["127.0.0.1"], "fritz.box": ["192.168.178.1"]}
    names |= {"example.com": ["93.184.215.14"], "mixed.example.com": ["93.184.215.14", "10.0.0.1"]}
    names |= {"kubernetes.default.svc": ["10.96.0.1"], "evil.example.com": ["127.0.0.2"], "8.8.8.8": ["8.8.8.8"]}
    look_up, judge = socket.getaddrinfo, web.is_public

    def answer(host: str, port: int | None, *rest: Any, **more: Any) -> Any:
        if host not in names:
            return look_up(host, port, *rest, **more)
        at, *later = names[host]
        names[host] = later or [at] if host == "rebinding.example.com" else names[host]
        found = [at] if host == "rebinding.example.com" else names[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(web, "is_public", lambda address: address == "127.0.0.2" or judge(address))
    web._has_inner_address.cache_clear()
    _web_client.cache_clear()
    return names


@pytest.mark.parametrize("uri", INNER_SPELLINGS)
def test_no_spelling_of_a_file_leads_into_a_network(uri: str, internet: dict[str, list[str]]) -> None:
    reason = "leads to .*; to read it, add --set data.val=|is .* with a password or a query, such as a signature"
    with pytest.raises(RecipeError, match=f"^data.val (of the recipe file )?({reason})"):
        open_data(Recipe.from_json(RECIPE.with_({"data.val": uri}).to_json()).data, seed=0)


@pytest.mark.parametrize("uri", ["https://example.com/a.rec", "http://93.184.216.34:80/a", "s3://bucket/a", "a.rec"])
def test_other_addresses(uri: str, internet: dict[str, list[str]]) -> None:
    assert not web.is_inner(uri)


def test_a_proxy_looks_names_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not web.is_inner("https://example.com/a.rec"), "tests have a proxy, and no names"
    assert web.is_inner("https://metadata.google.internal/a.rec")
    monkeypatch.setenv("no_proxy", "example.com")
    assert web.is_inner("https://example.com/a.rec")


class _Files(http.server.SimpleHTTPRequestHandler):
    """Gives ranges of files, and leads readers of /to/HOST:PORT/FILE there."""

    asked: ClassVar[list[tuple[str, str]]] = []
    root: ClassVar[Path]

    def do_GET(self) -> None:
        self.asked.append((str(self.connection.getsockname()[0]), self.path))
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", "http://" + self.path.removeprefix("/to/"))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        try:
            content = (self.root / self.path.lstrip("/")).read_bytes()
        except OSError:
            self.send_error(404)
            return
        first, last = 0, len(content) - 1
        if "Range" in self.headers:
            first, last = map(int, self.headers["Range"][6:].split("-"))
        part = content[first : last + 1]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture
def servers(digits: Path) -> Iterator[tuple[int, int]]:
    """Ports of a stranger's server at 127.0.0.2, and of one of this machine, which both have the digits."""
    _Files.asked, _Files.root = [], digits.parent
    with contextlib.ExitStack() as stack:
        ports = []
        for address in ("127.0.0.2", "127.0.0.1"):
            server = stack.enter_context(http.server.ThreadingHTTPServer((address, 0), _Files))
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            ports.append(server.server_port)
        yield ports[0], ports[1]


def test_a_public_address_of_a_file_is_read(
    servers: tuple[int, int], internet: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Data(train=f"http://evil.example.com:{servers[0]}/digits.rec")
    Run.create(tmp_path / "run", Recipe(data=data, model=Model("mlp"), budget=Budget(epochs=1), batch_size=64))
    assert main(["resume", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    assert {address for address, _ in _Files.asked} == {"127.0.0.2"}


@pytest.mark.parametrize("way", ["redirect", "redirect by name", "rebinding", "https"])
def test_a_strangers_server_leads_to_no_address_of_this_machine(
    way: str,
    servers: tuple[int, int],
    internet: dict[str, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs, ours = servers
    internet["rebinding.example.com"] = ["127.0.0.2", "127.0.0.1"]
    uri = {
        "redirect": f"http://evil.example.com:{theirs}/to/127.0.0.1:{ours}/digits.rec",
        "redirect by name": f"http://evil.example.com:{theirs}/to/localtest.me:{ours}/digits.rec",
        "rebinding": f"http://rebinding.example.com:{ours}/digits.rec",
        "https": f"http://evil.example.com:{theirs}/to/user:word@127.0.0.1:{ours}/digits.rec",
    }[way]
    Run.create(tmp_path / "run", RECIPE.with_({"data.train": uri}))
    assert main(["resume", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert " is not read: " in error and "refused" in error and "Traceback" not in error
    assert "127.0.0.1" not in {address for address, _ in _Files.asked}


def test_an_address_of_this_machine_that_the_command_names_is_read_and_may_redirect(
    servers: tuple[int, int], digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"http://localhost:{servers[1]}/to/127.0.0.1:{servers[1]}/digits.rec"
    assert main(["check", f"http://127.0.0.1:{servers[1]}/digits.rec"]) == 0, capsys.readouterr().err
    with open_data(Data(train=uri), seed=0).train as records:
        assert len(records) == 400
    assert {address for address, _ in _Files.asked} == {"127.0.0.1"}

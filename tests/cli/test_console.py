"""What a person sees while training: on a real terminal, in a log, and when nobody reads any more."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.cli.terminal import on_terminal, unstyled

from steadytrain.cli.console import Console, bar_line, note, print_json, progress
from steadytrain.cli.render import describe_event
from steadytrain.events import (
    Ceilings,
    Compiled,
    Ended,
    Evaluated,
    Event,
    Failed,
    FeedStats,
    Logged,
    Noticed,
    ProbeProgress,
    Saved,
    Started,
    Step,
    StepMeasured,
)

BEST = Evaluated(step=0, epoch=0.0, n=250, loss=0.7, top1=0.76, top5=0.99, seconds=2.1)
SCRIPT = """
import time
from steadytrain.cli.console import Console, note, progress
from tests.cli.test_console import events
with progress("packing photographs", 50) as advance:
    for done in range(1, 51):
        time.sleep(0.005)
        advance(done)
note("a note")
with Console() as console:
    for event in events(300):
        time.sleep(0.002)
        console.show(event)
        if event.kind == "Saved":
            note("written meanwhile")
"""


def events(steps: int = 40) -> Iterator[Event]:
    """A run of two epochs with everything in it."""
    half = steps // 2
    yield Started(
        digest="0123456789ab",
        step=0,
        steps=steps,
        steps_per_epoch=half,
        batch_size=128,
        attempt=1,
        data={"num_train": 45000, "num_val": 5000, "classes": ["cat", "dog"]},
        model={"name": "resnet20", "parameters": 272474},
        machine={"device": "cpu", "precision": "bf16"},
    )
    for step in range(1, steps + 1):
        yield Step(step=step, position=step * 128, n=128, seconds=0.25, wait_seconds=0.003, lr=0.1)
        if step % 10 == 0:
            yield logged(step, half)
        if step % half == 0:
            top1 = 0.75 if step == half else 0.7
            yield Evaluated(step=step, epoch=step / half, n=5000, loss=0.9, top1=top1, top5=0.99, seconds=2.1)
    yield Saved(step=steps, path="checkpoints/step-00000040", bytes=1234, seconds=0.02)
    yield Noticed(step=steps, message="checkpoint step-00000020 is corrupt: passed over, the one before it is used")
    yield Ended(status="finished", step=steps, seconds=130.0, images=steps * 128)


def logged(step: int, steps_per_epoch: int) -> Logged:
    return Logged(
        step=step,
        epoch=step / steps_per_epoch,
        loss=1.8321,
        top1=0.343,
        lr=0.1,
        images_per_second=412.34,
        wait_share=0.0123,
    )


def told(events: Iterator[Event], every_seconds: float = 0.0) -> list[str]:
    """The plain lines of these events."""
    text = io.StringIO()
    with Console(stream=text, every_seconds=every_seconds) as console:
        for event in events:
            console.show(event)
    return text.getvalue().splitlines()


def scripted(columns: int, **variables: str) -> tuple[int, str]:
    """What the script above shows on a terminal of that width: its exit code and all that the terminal was sent."""
    command = [sys.executable, "-c", SCRIPT]
    return on_terminal(command, columns, variables={"PYTHONPATH": str(Path(__file__).parents[2]), **variables})


def in_shell(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHON": sys.executable, **variables}
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)


def test_plain_lines_are_key_value_pairs() -> None:
    lines = told(events())
    assert lines[0] == (
        "started attempt=1 model=resnet20 num_train=45000 num_val=5000 classes=2 step=0 steps=40 batch_size=128"
        " device=cpu precision=bf16"
    )
    assert lines[1] == "step=10 epoch=0.50 loss=1.8321 top1=0.3430 lr=0.1 images_per_second=412.3 wait=0.012"
    assert lines[-1] == "finished step=40 seconds=130.0 images_per_second=39.4"
    assert all(re.fullmatch(r"(\w+ )?(\w+=(\"[^\"]*\"|\S+) ?)+", line) for line in lines)


def probe(images: int, fit_seconds: float | None = None) -> ProbeProgress:
    return ProbeProgress(step=0, images=images, total=794, seconds=images / 10, fit_seconds=fit_seconds)


def without_updates() -> Event:
    begun = next(events())
    assert isinstance(begun, Started)
    return replace(begun, steps=0)


def of_a_probe() -> Iterator[Event]:
    yield without_updates()
    yield from (probe(0), probe(412), probe(794), probe(794, fit_seconds=24.0))
    yield BEST
    yield Ended(status="finished", step=0, seconds=130.0, images=0)


def test_a_probe_has_lines_of_its_own_and_no_updates() -> None:
    lines = told(of_a_probe())
    assert "steps" not in lines[0] and "step=" not in lines[0]
    assert lines[2] == "features images=412 total=794 seconds=41.2 eta_seconds=38"
    assert lines[4] == "features images=794 total=794 seconds=79.4 fit_seconds=24.0"
    assert lines[-1] == "finished seconds=130.0"
    assert [line for line in told(of_a_probe(), 60.0) if line.startswith("features images=412")] == []
    words = [" ".join(describe_event(event, best_before=BEST)) for event in of_a_probe()]
    assert words[0] == "" and words[-2].startswith("probe val top-1 76.0 %")
    assert words[-1] == "finished after 2:10 best top-1 76.0 % by the probe"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ([probe(0)], r"probe  [━]{5,}  features: 0 of 794 images$"),
        ([probe(412)], r"probe  [━]{5,}  features: 412 of 794 images, 10 images/s, 0:38 left"),
        ([probe(794)], r"probe  [━]{5,}  fitting the classifier"),
        ([probe(794, fit_seconds=24.0)], r"probe .*features of 794 images in 1 min 19 s, classifier fitted in 24.0 s"),
    ],
)
def test_the_bar_of_a_probe_is_of_images(shown: list[Event], expected: str) -> None:
    console = Console(stream=io.StringIO())
    for event in (without_updates(), *shown):
        console.show(event)
    (line,) = console._lines(80, False)
    assert re.match(expected, line.plain) and "epoch" not in line.plain and line.cell_len < 80


def test_what_is_measured_for_the_ledger_is_no_line_for_a_person_and_compiling_is_one_in_words() -> None:
    measured = StepMeasured(
        step=20,
        batch_size=8,
        other_batch_size=4,
        passes={"full": 0.02, "other": 0.01},
        fixed_seconds=0.001,
        seconds=0.44,
    )
    assert describe_event(measured) == []
    event = Compiled(
        step=0, mode="default", seconds=12.0, graphs=1, breaks=(), images=64, eager_seconds=0.5, compiled_seconds=0.4
    )
    assert describe_event(event) == [
        "compiled (default) in 12.0 s: 1 graph",
        "a pass takes 400.0 ms, 500.0 ms without",
        "pays back after 7,680 images",
    ]


def test_ceilings_are_told_with_their_limit_and_the_room_that_is_left() -> None:
    ceilings = Ceilings(
        step=0, feed_images_per_second=900, compute_images_per_second=300, both_images_per_second=285, seconds=5
    )
    assert told(iter([ceilings])) == [
        "probed step=0 feed_images_per_second=900.0 compute_images_per_second=300.0 both_images_per_second=285.0"
        " ceiling=compute of_ceiling=0.950 feed_headroom=3.00"
    ]
    assert describe_event(ceilings) == [
        "probe, images/s: loading alone 900.0, updates alone 300.0",
        "both 285.0: 95 % of what the updates allow",
        "the data loader has room for 3.00 times as many",
    ]


def test_the_time_left_stands_still_in_a_slow_update(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(stream=io.StringIO())
    console.show(next(events(1000)))
    for step in range(1, 12):  # a slow first one, and then two a second
        console.show(Step(step=step, position=0, n=128, seconds=1, wait_seconds=0, lr=0.1, time=100 + step / 2))
    seconds = []
    for now in (105.5, 105.7, 106, 200, 4000):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        seconds.append(console._seconds_left())
    assert seconds == [pytest.approx(left) for left in (494.5, 494.3, 494, 494, 494)]


def test_no_time_is_left_while_the_last_evaluation_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(stream=io.StringIO())
    console.show(next(events(11)))
    for step in range(1, 12):
        console.show(Step(step=step, position=0, n=128, seconds=4, wait_seconds=0, lr=0.1, time=100 + 4 * step))
    monkeypatch.setattr(time, "time", lambda: 160.0)
    assert console._seconds_left() == 0


def test_the_time_left_hardly_rises_after_one_slow_update() -> None:
    console = Console(stream=io.StringIO())
    console.show(next(events(1000)))
    now, left = 100.0, []
    for step in range(1, 42):
        seconds = 60.0 if step == 40 else 0.5
        now += seconds
        console.show(Step(step=step, position=0, n=128, seconds=seconds, wait_seconds=0, lr=0.1, time=now))
        left.append(console._seconds_left())
    before, after = left[38], left[40]
    assert before is not None and after is not None and before < after < 1.1 * before
    for step in range(42, 82):  # each of them is slow: that is the pace now
        now += 5
        console.show(Step(step=step, position=0, n=128, seconds=5, wait_seconds=0, lr=0.1, time=now))
    slow = console._seconds_left()
    assert slow is not None and slow > 3 * after


def test_only_the_best_evaluation_so_far_is_marked() -> None:
    lines = [line for line in told(events()) if line.startswith("evaluated")]
    assert [line.endswith("best=yes") for line in lines] == [True, False]


def test_a_resumed_run_remembers_its_best_evaluation() -> None:
    text = io.StringIO()
    earlier = Evaluated(step=1, epoch=1, n=10, loss=1, top1=0.9, top5=1, seconds=1)
    with Console(best=earlier, stream=text) as console:
        console.show(Evaluated(step=2, epoch=2, n=10, loss=1, top1=0.8, top5=1, seconds=1))
    assert "best" not in text.getvalue()


def test_an_evaluation_that_is_not_a_number_is_never_the_best() -> None:
    nan = Evaluated(step=1, epoch=1, n=10, loss=float("nan"), top1=float("nan"), top5=0, seconds=1)
    good = Evaluated(step=2, epoch=2, n=10, loss=1, top1=0.8, top5=1, seconds=1)
    lines = told(iter([nan, good]))
    assert "best" not in lines[0]
    assert "best=yes" in lines[1]


def test_steps_and_feed_statistics_write_nothing() -> None:
    step = Step(step=1, position=1, n=1, seconds=1, wait_seconds=0, lr=0.1)
    feed = FeedStats(
        step=1, images=1, bytes=1, read_seconds=0, decode_seconds=0, batch_seconds=0, blocked_seconds=0, threads=1
    )
    assert told(iter([step, feed])) == []


def test_frequent_log_lines_are_thinned_but_the_last_before_an_evaluation_is_told() -> None:
    first = [f"step={step}" for step in (10, 20, 40)]
    lines = told(events(), every_seconds=1e9)
    assert [line.split()[0] for line in lines if line.startswith("step=")] == first


def test_a_message_cannot_steer_the_terminal_nor_break_the_line() -> None:
    lines = told(iter([Failed(step=3, error="DataError", message='a\x1b[2J"b"\nc')]))
    assert lines == [r'failed step=3 error=DataError message="a\u001b[2J\"b\"\nc"']


def test_short_work_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("packing", 100) as advance:
        for done in range(101):
            advance(done)
    line = capsys.readouterr().err
    assert re.fullmatch(r"packing: done=100 total=100 images_per_second=[\d.]+ seconds=[\d.]+\n", line)


def test_long_work_is_told_again_and_again_with_rate_and_eta(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading", 10, unit="files", every_seconds=0.0) as advance:
        advance(5)
        advance(10)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"reading: done=5 total=10 files_per_second=[\d.]+ eta_seconds=\d+", first)
    assert last.startswith("reading: done=10 total=10")


def test_a_total_may_be_told_late(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("packing", 0, every_seconds=0.0) as advance:
        advance(1)
        advance(2, 8)
    early, late, _ = capsys.readouterr().err.splitlines()
    assert ("total=1 " in early, "eta_seconds" in early) == (True, False)
    assert ("total=8 " in late, "eta_seconds" in late) == (True, True)


def test_progress_takes_totals_from_many_threads_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("packing", 0) as advance:
        threads = [threading.Thread(target=advance, args=(done,)) for done in (7, 42, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "done=42 total=42" in capsys.readouterr().err


def test_one_of_something_is_counted_in_the_singular() -> None:
    lines = [f"with progress('measuring', {n}, unit='combinations') as advance: advance({n})" for n in (1, 2)]
    code = "\n".join(["from steadytrain.cli.console import progress", *lines])
    _, sent = on_terminal([sys.executable, "-c", code], 80)
    assert "measuring: 1 combination in" in unstyled(sent) and "measuring: 2 combinations in" in unstyled(sent)


def test_work_that_fails_is_not_told_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="no"), progress("packing", 10):
        raise RuntimeError("no")
    assert capsys.readouterr().err == ""


def test_notes_are_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    note("two\nlines\x07")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "two lines?\n")


def test_on_a_terminal_errors_and_notes_are_folded_between_words(tmp_path: Path) -> None:
    folder = tmp_path / "a-folder-with-a-long-name-that-is-not-there"
    for verb in ("train", "check"):
        code, sent = on_terminal([sys.executable, "-m", "steadytrain", verb, str(folder)], 60)
        words = unstyled(sent).split()
        assert code == 2 and f"{folder}." in words and "steady:" in words, "no word is broken"
        assert all(len(line) <= 60 or len(line.split()) == 1 for line in unstyled(sent).splitlines())


WAITING = """
import time
from steadytrain.cli.console import note, print_text, progress, status
with status("reading"):
    note("to " + "x" * 90)
    time.sleep(0.4)
    with progress("packing", 2) as advance:
        time.sleep(0.4)
        note("beside " + "y" * 90)
        advance(2)
    time.sleep(0.4)
    note("after it")
    print_text("result")
    time.sleep(0.4)
"""


def test_what_is_waited_for_comes_back_after_a_bar_and_gives_way_to_a_result() -> None:
    code, sent = on_terminal([sys.executable, "-c", WAITING], 80)
    text = unstyled(sent)
    assert code == 0 and "x" * 90 in text and "y" * 90 in text, "a path stays whole"
    assert text.index("reading") < text.index("packing") < text.index("after it") < text.index("result")
    assert "reading" in text[text.index("packing: 2 images") : text.index("after it")], "it has come back"
    assert "reading" not in text[text.index("result") :], "it has given way"


THREADS = """
import sys, threading, time
from steadytrain.cli.console import is_waiting, note, progress
def work(number):
    for _ in range(5):
        with progress(f"work {number}", 20) as advance:
            for done in range(1, 21):
                time.sleep(0.002)
                advance(done)
            note(f"note {number}")
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
left = [thread.name for thread in threading.enumerate() if thread.name == "steady-foot"]
print(f"left: {left} {is_waiting()} {sys.stderr is sys.__stderr__}")
"""


def test_displays_of_several_threads_leave_nothing() -> None:
    code, sent = on_terminal([sys.executable, "-c", THREADS], 80)
    text = unstyled(sent)
    assert code == 0 and "Traceback" not in text and "left: [] False True" in text
    assert text.count("20 images in") == text.count("note") == 20


INTERRUPTED = """
from rich.live import Live
from steadytrain.cli.console import is_waiting, note, progress, status
start, starts = Live.start, []
def interrupted(live):
    starts.append(live)
    if len(starts) == 2:
        raise KeyboardInterrupt
    start(live)
Live.start = interrupted
try:
    with status("reading"), progress("packing", 2):
        pass
except KeyboardInterrupt:
    note(f"waits: {is_waiting()}")
"""


def test_a_display_that_is_interrupted_as_it_begins_is_closed() -> None:
    code, sent = on_terminal([sys.executable, "-c", INTERRUPTED], 80)
    assert code == 0 and "waits: False" in unstyled(sent)


def test_a_long_name_leaves_the_figures_of_its_bar() -> None:
    line = bar_line("packing /data/" + "photographs/" * 9, 0.25, " 25 %  0:09 left", 60, False)
    assert line.plain.startswith("packing /data/") and "...  " in line.plain
    assert line.plain.endswith(" 25 %  0:09 left") and line.cell_len < 60


def test_a_document_has_null_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "rates": (float("inf"), 1.5)})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "rates": [None, 1.5]}


DURING = """
from steadytrain.cli.console import Console, status
with status("working"), Console() as console:
    print("a bar" if console.is_live else "lines")
"""


def test_training_draws_its_bar_where_something_was_waited_for() -> None:
    code, sent = on_terminal([sys.executable, "-c", DURING], 80)
    assert code == 0 and "a bar" in unstyled(sent)


READING = """
import sys, time
from importlib import import_module
module, _, name = sys.argv[1].rpartition(".")
def slow(*args, **options):
    time.sleep(0.4)
    raise SystemExit(0)
setattr(import_module(module), name, slow)
sys.argv[1:] = sys.argv[2:]
from steadytrain.cli import main
main()
"""


@pytest.mark.parametrize(
    ("verb", "reads"),
    [("report", "reports.files.find_all"), ("runs", "reports.run_list.list_runs"), ("cost", "reports.costs.costs_of")],
)
def test_what_reads_many_runs_says_so(verb: str, reads: str, tmp_path: Path) -> None:
    script = [sys.executable, "-c", READING, f"steadytrain.{reads}", verb, str(tmp_path)]
    code, sent = on_terminal(script, 80)
    assert code == 0 and "reading" in unstyled(sent)
    assert subprocess.run(script, capture_output=True, check=True).stderr == b""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["watch", "--"], "watching process"),
        pytest.param(["launch", "--procs", "2", "--"], "starting 2 ranks of", marks=pytest.mark.slow),
    ],
)
def test_of_a_program_that_is_silent_its_start_is_said_on_a_terminal(
    words: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("print('own words')")
    command = [sys.executable, "-m", "steadytrain", *words, "python", str(tmp_path / "own.py")]
    code, sent = on_terminal(command, 80)
    text = unstyled(sent)
    assert code == 0 and 0 <= text.find(said) < text.find("own words")
    assert said.encode() not in subprocess.run(command, capture_output=True, check=True).stderr


def test_a_call_at_pythons_prompt_says_that_it_works(tmp_path: Path) -> None:
    (tmp_path / "old.log").write_text("INFO:root:Epoch[0] Validation-accuracy=0.5\n")
    call = f"st.report({str(tmp_path / 'old.log')!r}, {str(tmp_path / 'report.md')!r})"
    script = f"import steadytrain as st\nprint({call}.name)"
    code, sent = on_terminal([sys.executable, "-c", f"import sys; sys.ps1 = '>>> '\n{script}"], 80)
    assert code == 0 and sent.startswith("working\r       \rreport.md"), "the word is gone before the result"
    assert on_terminal([sys.executable, "-c", script], 80) == (0, "report.md\r\n"), "a program's terminal is its own"


LOADING = """
import sys
from pathlib import Path
folder = Path(sys.argv[1]) / "torch"
folder.mkdir()
(folder / "__init__.py").write_text("import time; time.sleep(0.5)")
sys.path.insert(0, sys.argv[1])
from steadytrain import cli
def verb(words):
    import torch, time
    time.sleep(0.5)
    return 0
cli._run = verb
sys.argv = ["steady", "doctor"]
sys.exit(cli.main())
"""


def test_whatever_loads_torch_says_so(tmp_path: Path) -> None:
    code, sent = on_terminal([sys.executable, "-c", LOADING, str(tmp_path)], 80)
    text = unstyled(sent)
    assert code == 0 and 0 <= text.find("loading torch") < text.find("working")


RACE = """
import sys
from steadytrain.cli import console
console.DRAWS_PER_SECOND = 2000
sys.setswitchinterval(1e-6)
for number in range(400):
    with console.status("waiting"):
        console.note(f"line {number}")
        console.note("more")
"""


def test_a_line_is_never_joined_to_what_is_waited_for() -> None:
    """Two threads write: the one that draws, and whoever has something to say."""
    code, sent = on_terminal([sys.executable, "-c", RACE], 80)
    assert code == 0 and "waitingline" not in unstyled(sent) and "waitingmore" not in unstyled(sent)


@pytest.mark.parametrize("columns", [60, pytest.param(120, marks=pytest.mark.slow)])
def test_on_a_terminal_no_line_is_wider_than_it(columns: int) -> None:
    code, sent = scripted(columns)
    assert code == 0
    assert max(len(line) for line in re.split(r"[\r\n]+", unstyled(sent))) <= columns
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l"), "the cursor is shown again"


def test_on_a_terminal_figures_are_drawn_and_results_stay() -> None:
    code, sent = scripted(100)
    text = unstyled(sent)
    assert code == 0
    assert re.search(r"packing photographs  ━+ +\d+ %  [\d,.]+ images/s  0:0\d left", text)
    assert re.search(r"step \d+/300  loss 1.8321  train top-1 34.3 %  lr 0.1  412.3 images/s  wait 1.2 %", text)
    for line in (
        "epoch 1  val top-1 75.0 %  loss 0.9000  best",
        "written meanwhile",
        "finished at step 300 after 2:10  295.4 images/s overall  best top-1 75.0 % at epoch 1",
    ):
        assert text.count(line) == 1, line
    assert "\x1b[32m" in sent
    assert sent.count("\x1b[2K") < 300, "no drawing for each step"


def test_no_color_is_respected() -> None:
    _, sent = scripted(80, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m|\x1b\[9[0-7]m", sent)


def test_a_dumb_terminal_gets_plain_lines() -> None:
    code, sent = scripted(80, TERM="dumb")
    assert code == 0
    assert "\x1b" not in sent
    assert "evaluated step=150 " in sent


def test_a_terminal_without_unicode_gets_an_ascii_bar() -> None:
    code, sent = scripted(80, PYTHONIOENCODING="ascii:strict")
    assert code == 0
    assert re.search(r"#+-+", unstyled(sent))


def test_a_log_in_ascii_escapes_what_it_cannot_hold() -> None:
    code = """
        from steadytrain.cli.console import Console, note
        from steadytrain.events import Noticed
        with Console() as console:
            console.show(Noticed(message="für"))
        note("für")
    """
    done = in_shell('"$PYTHON" -c "$CODE"', CODE=textwrap.dedent(code), PYTHONIOENCODING="ascii:strict")
    assert (done.returncode, done.stderr) == (0, "notice step=0 message=f\\xfcr\nf\\xfcr\n")


@pytest.mark.parametrize("ending", ["2>&1 | head -n 1", "2>&-"], ids=["reader leaves", "closed"])
def test_work_goes_on_without_a_reader(ending: str, tmp_path: Path) -> None:
    code = SCRIPT + "import sys\nprint('worked', file=open(sys.argv[1], 'w'))\n"
    script = f'"$PYTHON" -c "$CODE" "$OUT" {ending}; echo ${{PIPESTATUS[0]}} $(cat "$OUT")'
    done = in_shell(script, CODE=code, OUT=str(tmp_path / "out"))
    assert done.stdout.splitlines()[-1] == "0 worked"


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_a_command_works_where_a_stream_is_closed(closed: str) -> None:
    assert in_shell(f'"$PYTHON" -m steadytrain help noisy_neighbour {closed}').returncode == 0
    failed = in_shell(f'"$PYTHON" -m steadytrain check nowhere-at-all {closed}')
    assert failed.returncode == 2 and failed.stdout == "", "an error is no result"


def test_watching_needs_rich_only_on_a_terminal() -> None:
    code = SCRIPT + "import sys\nassert 'rich' not in sys.modules\n"
    assert in_shell('"$PYTHON" -c "$CODE"', CODE=code).returncode == 0

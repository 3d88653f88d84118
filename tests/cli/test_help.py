"""``steady help``: commands, causes and errors by name, and where the terminal names it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from steadytrain.cli import _fail, main
from steadytrain.cli.help import topic_of
from steadytrain.monitor import Cause, Diagnosis
from steadytrain.monitor.ledger import Ledger, empty
from steadytrain.monitor.rules.diagnose import Ceiling
from steadytrain.reports.verdict import ceiling_line, verdict_brief, verdict_line, verdict_text

SLOW = Cause(
    name="noisy_neighbour", share=0.4, sentence="Other processes take 1.4 cores.", change="stop them", saves=0.4
)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["noisy_neighbour"], "other processes take the cores"),
        (["noisy", "neighbour"], "other processes take the cores"),
        (["noisy-neighbour"], "other processes take the cores"),
        (["DivergedError"], "steady replay RUN"),
        (["runs is not a run: it has no recipe.json. It holds 2 runs"], "Runs lie one level deeper"),
        (["the", "disk", "is", "full"], "Nothing that was saved is lost"),
        (["nan"], "Lower the learning rate"),
        (["OOM"], "Out of memory"),
        (["launch"], "steady launch --help"),
        (["train"], "Usage: steady train DATA"),
        (["bench", "infer"], "Usage: steady bench infer"),
        ([], "Usage: steady COMMAND"),
        (["topics"], "storage_first_epoch"),
    ],
)
def test_help_explains_what_was_named(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *words]) == 0
    assert part in capsys.readouterr().out


def test_help_shows_links_as_the_names_of_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "import"]) == 0
    text = capsys.readouterr().out
    assert "(docs/trust)" in text and "](" not in text


def test_an_unknown_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "noisy_neighbor"]) == 2
    assert "'noisy_neighbor'. Did you mean noisy_neighbour? steady help topics lists" in capsys.readouterr().err


def test_a_word_of_several_explanations_is_answered_with_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "cuda"]) == 2
    assert "See steady help no-gpu, " in capsys.readouterr().err


def test_an_error_on_a_terminal_names_its_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, ends in ((_Terminal(), "\n  more: steady help not-a-run\n"), (io.StringIO(), "recipe.json\n")):
        monkeypatch.setattr("sys.stderr", stream)
        assert _fail("runs is not a run: it has no recipe.json", 2) == 2
        assert stream.getvalue().endswith(ends)


def test_a_mistake_in_a_flag_has_no_page_and_names_none() -> None:
    assert topic_of("--lr is 'x'; it must be a number") == ""


def test_a_verdict_names_its_explanation_in_words_and_not_in_the_line() -> None:
    assert verdict_brief(SLOW, width=80)[-1] == "  more: steady help noisy_neighbour"
    assert "more" not in verdict_line(SLOW)
    fine = Cause(name="nothing", share=0.0, sentence="No bottleneck found.")
    assert verdict_brief(fine, width=80) == ["verdict: No bottleneck found."]


def test_a_ceiling_that_was_slowed_is_no_praise() -> None:
    """Beside a cause that slows the updates, "100 % of what is possible" would deny it."""
    ceiling = Ceiling(images_per_second=17.2, compute=57.3, feed=282.0, limit="compute", probed=False)
    ceiling = replace(ceiling, without="noisy_neighbour")
    ledger = Ledger(wall_seconds=10.0, away_seconds=0.0, seconds=empty() | {"forward": 10.0}, steps=4, images=172)
    slowed = Diagnosis(causes=(SLOW,), ledger=ledger, ceiling=ceiling, not_measurable=())
    how = "estimated from the run, without the noisy neighbour"
    assert ceiling_line(slowed) == f"30 % of the 57.3 images/s that computing alone would allow ({how})"
    assert how in " ".join(verdict_text(slowed, "a", width=100).split())
    measured = replace(slowed, ceiling=replace(ceiling, probed=True, without=""))
    assert ceiling_line(measured) == "30 % of the 57.3 images/s that computing alone would allow (measured)"

"""Decoders: those that are installed, and a wheel for another processor."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from PIL import features

from steadytrain.doctor.child import Answer, asked
from steadytrain.doctor.decoders import QUESTION, decoders
from steadytrain.records import resize


def test_the_installed_decoders() -> None:
    with asked(QUESTION) as child:
        told = decoders(child.answer(240))
    assert (told.simplejpeg_error, told.pillow_error) == (None, None)
    assert (told.simplejpeg_turbo or "").count(".") == 2 and told.simplejpeg_simd is True
    assert told.pillow_turbo == features.version("libjpeg_turbo")
    assert (told.pillow_webp, told.pillow_avif) == (features.check("webp"), features.check("avif"))


def test_one_that_cannot_be_loaded_does_not_hide_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "simplejpeg.py").write_text("raise ImportError('GLIBC_2.38 not found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with asked(QUESTION) as child:
        told = decoders(child.answer(240))
    assert told.simplejpeg_error == "ImportError: GLIBC_2.38 not found" and told.simplejpeg_simd is None
    assert told.pillow_error is None and told.pillow_turbo


def test_what_scales_images_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with asked(QUESTION) as child:
        told = decoders(child.answer(240))
    assert told.resizer == (metadata.version("cykooz-resizer") if resize.wheel is not None else "no")
    for text, found in (("raise ModuleNotFoundError('x')", ("no", None)), ("1 / 0", (None, "ZeroDivisionError"))):
        (tmp_path / "cykooz_resizer.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with asked(QUESTION) as child:
            told = decoders(child.answer(240))
        assert told.resizer == found[0] and (told.resizer_error or "").partition(":")[0] == (found[1] or "")


def test_which_decoder_of_jpegs_is_at_work_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        ("DECODES, VERSION = True, 5", ("native", "5", None)),
        ("DECODES, VERSION = False, 5", ("simplejpeg", "idle", None)),
        ("raise ModuleNotFoundError('x')", ("simplejpeg", "no", None)),
        ("raise ImportError('x')", ("simplejpeg", None, "ImportError: x")),
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "steadytrain").mkdir()
    (tmp_path / "steadytrain" / "__init__.py").touch()
    for text, found in cases:
        (tmp_path / "steadytrain" / "native.py").write_text(text)
        with asked(QUESTION) as child:
            told = decoders(child.answer(240))
        assert (told.jpeg, told.parts, told.parts_error) == found


def test_a_crash_is_told_of_both() -> None:
    told = decoders(Answer({}, "ended by SIGILL: without a word"))
    assert told.simplejpeg_error == told.pillow_error == "ended by SIGILL: without a word"


def test_another_libjpeg_in_pillow_is_told_apart_from_an_unknown_one() -> None:
    pillow = {"turbo": "no", "webp": False, "avif": False, "jpg_2000": True, "zlib_ng": False}
    assert decoders(Answer({"pillow": pillow})).pillow_turbo == "no"
    assert decoders(Answer({})).pillow_turbo is None

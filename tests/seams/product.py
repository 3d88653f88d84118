"""The product as these tests see it: public names, and the command line in this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import steadytrain as st
from steadytrain.cli import main

# The one place that knows how the loader's public names are spelled.
ImageLoader = st.ImageLoader
ImageLoaderDataset = st.ImageLoaderDataset
Crop = st.Crop
BlockShuffle = st.BlockShuffle
Unpacked = st.Unpacked

STEADY = [sys.executable, "-m", "steadytrain"]


@dataclass(frozen=True)
class Answer:
    """What one command line returned and printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output, which is one JSON document."""
        return json.loads(self.out)


def steady(*words: object, code: int | None = 0) -> Answer:
    """Run ``steady WORDS`` in this process; ``code`` is what it has to return, None for anything."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        returned = main([str(word) for word in words])
    answer = Answer(returned, out.getvalue(), err.getvalue())
    assert code is None or returned == code, answer
    return answer


def steady_process(*words: object, code: int | None = 0, **variables: str) -> Answer:
    """Run ``steady WORDS`` in a process of its own."""
    command = [*STEADY, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **variables})
    answer = Answer(done.returncode, done.stdout, done.stderr)
    assert code is None or done.returncode == code, answer
    return answer

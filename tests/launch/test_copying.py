"""Of a working directory, history, results, caches and secrets stay here."""

from __future__ import annotations

from pathlib import Path

from steadytrain.launch.submit import choose

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n"


def _write(folder: Path, *names: str, text: str = "x") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_belongs_to_the_work_is_copied_and_nothing_else(tmp_path: Path) -> None:
    _write(tmp_path, "train.py", "data/cats.rec", "nets/tiny.py", "a b\nc.txt", ".hidden", "runs.txt")
    _write(tmp_path, ".git/HEAD", "runs/a/events.jsonl", "nets/__pycache__/tiny.pyc", ".venv/bin/python", "launch/x.sh")
    chosen = choose(tmp_path)
    assert sorted(chosen.files) == [".hidden", "a b\nc.txt", "data/cats.rec", "nets/tiny.py", "runs.txt", "train.py"]
    assert (chosen.bytes, chosen.secret) == (6, ())


def test_secrets_stay_and_are_named(tmp_path: Path) -> None:
    _write(tmp_path, "train.py", ".env", ".env.local", "cert.pem", "id_ed25519", ".ssh/config", "aws/credentials")
    _write(tmp_path, "nets/deploy", text=KEY)
    chosen = choose(tmp_path)
    assert chosen.files == ("train.py",)
    left = {".env", ".env.local", "cert.pem", "id_ed25519", ".ssh", "aws/credentials", "nets/deploy"}
    assert set(chosen.secret) == left


def test_names_and_paths_can_be_left_out(tmp_path: Path) -> None:
    _write(tmp_path, "a.tmp", "data/b.tmp", "data/raw/c.jpg", "other/raw/d.jpg", "e.txt")
    assert choose(tmp_path, ["*.tmp", "./data/raw/"]).files == ("e.txt", "other/raw/d.jpg")


def test_links_stay_links_and_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "gone").symlink_to("/nowhere")
    _write(tmp_path, "a.txt")
    assert choose(tmp_path).files == ("a.txt", "gone", "loop")

"""Whether ``steady serve`` answers as its OpenAPI document says: cases that schemathesis makes from the document.

Each kind of server is started with a tiny network, and asked what the document allows and what it does not: examples,
limits of each field, random values, and sequences. A failure is a status or a content type that is not in the document,
an answer that does not match its schema, a status from 500 on, no answer within 10 s, or an invalid request that is
taken. Images are real ones in a part of the cases.

``one_label``    a network that names one class for each image
``labels``       one whose images have several labels
``token``        one label, and a token; also without it, and with a wrong one

usage: python benchmarks/api_conformance.py --schemathesis FOLDER/bin/schemathesis [--examples 300] [--seed 1] [--save]

schemathesis is installed into an environment of its own: pip install schemathesis.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
from serve import Contender, running

PORT, TOKEN = 18700, "s3cret"
CONFIG = """
[checks.positive_data_acceptance]
# Random bytes are no image; a threshold is for labels, an address for servers that fetch.
expected-statuses = [200, 400, 403, 413, 422]
"""
HOOKS = '''
"""What schemathesis cannot know: some bodies are images."""
import io, struct, zlib
import schemathesis
from hypothesis import strategies as st

def png(side, shade):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    rows = zlib.compress((b"\\0" + bytes([shade]) * side) * side)
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")

images = st.builds(png, st.integers(1, 40), st.integers(0, 255))
for kind in ("application/octet-stream", "image/*", "image/png"):
    schemathesis.openapi.media_type(kind, images | st.binary(max_size=2000))
'''


def servers(folder: Path) -> dict[str, list[str]]:
    """Write the weights; return the command of each kind of server."""
    import timm
    import torch

    from steadytrain.models import Input
    from steadytrain.training.checkpoints import stage, write_weights

    network = timm.create_model("test_resnet", num_classes=7)
    torch.save(network.state_dict(), folder / "w.pth")
    input = Input(size=32, mean=(0.5,) * 3, std=(0.5,) * 3, crop=1.0, interpolation="bilinear", channels=3)
    about = {"model": {"name": "timm/test_resnet", "options": {}}, "input": vars(input), "multi_label": True}
    write_weights(folder / "labels.safetensors", stage(network.state_dict()), about | {"classes": list("abcdefg")})
    serve = [*machine.STEADY, "serve"]
    more = ["--device", "cpu", "--port", "PORT", "--max-batch", "8", "--max-wait-ms", "0"]
    one_label = [*serve, str(folder / "w.pth"), "--model", "timm/test_resnet", *more]
    labels = [*serve, str(folder / "labels.safetensors"), *more]
    return {"one_label": one_label, "labels": labels, "token": [*one_label, "--token", TOKEN]}


def tried(name: str, command: list[str], port: int, folder: Path, args: Any) -> dict[str, Any]:
    """Run schemathesis against one server; return what it counted."""
    report = folder / f"{name}.json"
    (folder / "schemathesis.toml").write_text(CONFIG)
    (folder / "hooks.py").write_text(HOOKS)
    address = f"http://127.0.0.1:{port}"
    words = [args.schemathesis, "--config-file", str(folder / "schemathesis.toml"), "run", f"{address}/openapi.json"]
    words += ["--url", address, "--checks", "all", "--max-examples", str(args.examples), "--seed", str(args.seed)]
    words += ["--request-timeout", "10", "--continue-on-failure", "--report-json-path", str(report), "--no-color"]
    words += ["--header", f"Authorization: Bearer {TOKEN}"] if name == "token" else []
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(folder)}
    with running(Contender(command, "/ready", "image/png"), port):
        said = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    machine.say(said.stdout)
    told = json.loads(report.read_text())
    kept = ("schemathesis_version", "seed", "complete", "operations", "test_cases", "failures", "errors")
    return {"exit": said.returncode, "examples": args.examples} | {key: told[key] for key in kept}


def main() -> int:
    """Try each kind of server; return 1 where one does not answer as its document says."""
    parser = machine.parser(__doc__)
    parser.add_argument("--schemathesis", required=True)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    os.environ.pop("STEADYTRAIN_TOKEN", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = servers(folder)
        rows = {
            kind: tried(kind, command, PORT + place, folder, args)
            for place, (kind, command) in enumerate(kinds.items())
            if kind in (args.only or kinds)
        }
    machine.record(machine.of_cases("api_conformance", list(rows), kinds), {"servers": rows}, save=args.save)
    return int(any(row["exit"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())

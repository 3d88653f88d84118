"""README's table of figures on this machine: each row measured anew, with its peers, beside README's figure.

README's figures are those of ``results/readme_ROW.json``, all of one machine and one day, which ``--save`` writes; this
reads the same numbers out of what the same scripts print here. Most are ratios of turns in one run, which another
machine changes little; where one differs by more than a fifth, the row says so. Peers get environments of their own
under ``--envs`` (``peers/environments.py``; up to 7 GB); one that cannot be had is a line below the table, and its row
does without it.

usage: python benchmarks/rerun.py [--data FOLDER | --photos FOLDER] [--only ROW ...] [--quick] [--no-peers] [--save]

FOLDER of ``--data`` holds imagenet-sample-200.tar and cifar10-png.tar.zst. Without them give any folder of at least 20
JPEG photographs (``--photos``): the rows ``loader`` and ``serve`` take 200 of them. ``--quick`` shows that it works, in
minutes: few turns, small networks; its figures are rough. All rows in full take a night on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
from machine import say
from peers import environments
from peers.environments import UnavailableError
from peers.feed_peers import PEERS

HERE = Path(__file__).resolve().parent
SAMPLE, DIFFERS, BUSY = "imagenet-sample-200.tar", 0.2, 0.5  # BUSY: of the cores, what others may have
SEED = 30  # of the faults, drawn after the verdict's rules were written
Document = dict[str, Any]


@dataclass
class Setting:
    """What a row may use: its data, where environments lie, and how much time there is; ``missing``: why a peer is."""

    data: Path | None
    envs: Path
    work: Path
    quick: bool
    peers: bool
    missing: list[str] = field(default_factory=list)

    def python_of(self, name: str) -> Path | None:
        """Return the Python of a peer's environment, made if need be; None where it cannot be had."""
        if not self.peers:
            return None
        try:
            given = os.environ.get("STEADYTRAIN_MXNET_PYTHON")
            return environments.make(name, self.envs, {"3.8": given} if given else {})
        except UnavailableError as error:
            self.missing.append(f"{name}: cannot be installed here: {error}")
            return None

    def archive(self, name: str = SAMPLE) -> Path:
        """Return an archive of the data. Raises UnavailableError where there is none."""
        if self.data is None or not (self.data / name).exists():
            raise UnavailableError(f"needs {name} in --data" + (", or --photos FOLDER" if name == SAMPLE else ""))
        return self.data / name


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        what: its first words in README.
        words: of the script that measures it, for a setting. Raises UnavailableError.
        figures: each figure's name and value in the script's document; what was not measured is left out.
    """

    what: str
    words: Callable[[Setting], list[str]]
    figures: Callable[[Document], dict[str, float]]


def _loader(setting: Setting) -> list[str]:
    peers = [name for name in ("torchvision-io", "pillow") if setting.quick] or list(PEERS)
    if not setting.peers:
        peers = []
    words = ["feed.py", "--data", str(setting.archive().parent), "--works", "packed", "--phases", "train", "--cores"]
    words += ["1", "--no-memory", "--envs", str(setting.envs), "--peers", *peers]
    return [*words, *(["--rounds", "1", "--seconds", "1"] if setting.quick else [])]


def _loader_figures(document: Document) -> dict[str, float]:
    compared = document["works"]["packed"]["train"]["1 cores"]
    ratios: Document = compared["ratios"].get("images_per_second", {})
    names = {"steadytrain": "without the native decoder", "steadytrain with native": "native"}
    names["steadytrain with steadytrain-jpeg"] = "native"  # its name in older records
    return {f"{names[name]}, over the fastest peer": ratios[name] for name in names if name in ratios}


def _train(setting: Setting) -> list[str]:
    words = ["train_step.py", "--cases", "resnet20", *([] if setting.quick else ["resnet50"])]
    if python := setting.python_of("mxnet"):
        words += ["--mxnet-python", str(python)]
    return [*words, *(["--rounds", "1"] if setting.quick else [])]


def _train_figures(document: Document) -> dict[str, float]:
    peers = {"mxnet": "MXNet", "bare": "a plain PyTorch loop"}
    return {
        f"{case}, over {peers[peer]}": document[case]["times"]["steadytrain"][peer]
        for case in ("resnet20", "resnet50")
        for peer in peers
        if case in document and peer in document[case]["times"]["steadytrain"]
    }


def _recover_figures(document: Document) -> dict[str, float]:
    def share(text: str) -> float:
        part, _, of = text.partition(" of ")
        return int(part) / int(of)

    starters = [document[name] for name in ("steady", "torchrun") if name in document]
    return {
        "kills that lost nothing": 1 - sum(share(each["lost"]) for each in starters) / len(starters),
        "equal weights": sum(share(each["weights_equal"]) for each in starters) / len(starters),
    }


def _serve(setting: Setting) -> list[str]:
    if shutil.which("wrk") is None:
        raise UnavailableError("needs wrk: apt install wrk")
    images = setting.work / "images"
    if not images.exists():
        with tarfile.open(setting.archive()) as tar:
            tar.extractall(images, filter="data")
    words = ["serve.py", "--images", str(images)]
    if python := setting.python_of("serve"):
        words += ["--peers", str(python)]
    return [*words, *(["--rounds", "1", "--seconds", "3", "--model", "timm/test_resnet"] if setting.quick else [])]


def _serve_figures(document: Document) -> dict[str, float]:
    rates = {name: each["images_per_second"] for name, each in document["contenders"].items()}
    figures = {f"{name}, of a loop": rates[name] / rates["direct"] for name in ("litserve", "fastapi") if name in rates}
    return {"steadytrain, of a loop": document["steady_to_direct"], **figures}


def _verdict(setting: Setting) -> list[str]:
    data = str(setting.archive("cifar10-png.tar.zst").parent)
    setting.archive()
    return ["verdict.py", "--data", data, "--drawn", "2" if setting.quick else "99", "--seed", str(SEED)]


def _verdict_figures(document: Document) -> dict[str, float]:
    heavy = document["heavy"]
    return {"named first": document["right"] / heavy} if heavy else {}


ROWS = {
    "loader": Row("Loading packed images", _loader, _loader_figures),
    "train": Row("Training ResNet-20 and ResNet-50", _train, _train_figures),
    "kills": Row(
        "Kills of a two-rank run",
        lambda setting: ["recover.py", *(["--quick", "--starters", "steady"] if setting.quick else [])],
        _recover_figures,
    ),
    "serve": Row("Serving ResNet-50 over HTTP", _serve, _serve_figures),
    "verdict": Row("Faults named first by the verdict", _verdict, _verdict_figures),
}


def readme_file(name: str) -> Path:
    """Return the file of a row's figures in README."""
    return machine.RESULTS / f"readme_{name}.json"


def readme_record(name: str) -> Document:
    """Return what README's figures of a row were read from."""
    document: Document = json.loads(readme_file(name).read_text(encoding="utf-8"))
    return document


def measure(row: Row, setting: Setting) -> Document:
    """Run a row's script and return its document. Raises UnavailableError where it ends without one."""
    words = row.words(setting)
    say(f"== {row.what}: python benchmarks/{' '.join(words)}")
    script = [sys.executable, str(HERE / words[0]), *words[1:]]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=False)
    try:
        document: Document = json.loads(done.stdout[done.stdout.index("{\n") :])
    except ValueError:
        raise UnavailableError(f"{words[0]} ended with code {done.returncode} and no figures (see above)") from None
    setting.missing += [f"{peer}: {why}" for peer, why in document.get("not_to_be_had", {}).items()]
    return document


def table(figures: dict[str, dict[str, float]]) -> str:
    """Format the figures of each row beside README's, and say which differ.

    >>> print(table({"kills": {"equal weights": 1.0}}))
    | row | figure | here | README | here / README |
    |---|---|---|---|---|
    | kills | equal weights | 1 | 1 (2026-11-30) | 1.00 |
    """
    lines = ["| row | figure | here | README | here / README |", "|---|---|---|---|---|"]
    for name, here in figures.items():
        record = readme_record(name)
        there = ROWS[name].figures(record)
        for figure, value in here.items():
            before = there.get(figure)
            ratio = value / before if before else None
            beside = "-" if before is None else f"{before:.3g} ({record['machine']['date'][:10]})"
            differs = "" if ratio is None else f"{ratio:.2f}{' **differs**' * (abs(ratio - 1) > DIFFERS)}"
            lines.append(f"| {name} | {figure} | {value:.3g} | {beside} | {differs or '-'} |")
    return "\n".join(lines)


def words_of(facts: Document) -> str:
    """Word a machine in a line."""
    load = facts["load_average"]["before"]
    memory = f"{facts['memory_bytes'] / 1e9:.0f} GB"
    packages = f"torch {facts['packages']['torch']}, Python {facts['python']}"
    return f"{facts['cores']} cores of {facts['cpu']} ({facts['isa']}), {memory}, {packages}, load {load}"


def sample_of(photos: Path, work: Path) -> Path:
    """Write 200 photographs of a folder as the archive that scripts read; return its folder."""
    paths = [path for path in sorted(photos.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    if len(paths) < 20:
        raise SystemExit(f"--photos {photos} holds {len(paths)} JPEG photographs, and 20 are needed")
    with tarfile.open(work / SAMPLE, "w") as tar:
        for number in range(200):
            tar.add(paths[number * len(paths) // 200], f"{number:03}.JPEG")
    return work


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = machine.parser(
        __doc__, data=f"{SAMPLE} and cifar10-png.tar.zst", needs_data=False, choose=("--only", ROWS)
    )
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="photographs in place of --data")
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "steadytrain-peers")
    parser.add_argument("--quick", action="store_true", help="minutes instead of a night: shows that it works")
    parser.add_argument("--no-peers", action="store_true", help="install nothing: without peers of other environments")
    args = parser.parse_args()
    if args.save and args.quick:
        parser.error("--save is for figures, and those of --quick are rough: drop one of them")
    return args


def run(names: Iterable[str], setting: Setting) -> dict[str, Document]:
    """Measure rows; what cannot be measured is noted and left out."""
    documents = {}
    for name in names:
        try:
            documents[name] = measure(ROWS[name], setting)
            if not ROWS[name].figures(documents[name]):
                setting.missing.append(f"row {name}: no peer took part, so there is no ratio")
        except UnavailableError as error:
            setting.missing.append(f"row {name}: {error}")
    return documents


def main() -> int:
    """Measure, and print the table with both machines and what is missing; return 1 where a row is."""
    args = arguments()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rerun-")))
        data = sample_of(args.photos, work) if args.photos else args.data
        setting = Setting(data, args.envs, work, args.quick, not args.no_peers)
        documents = run(args.only, setting)
    print(table({name: ROWS[name].figures(document) for name, document in documents.items()}), end="\n\n")
    print(f"here: {words_of(machine.facts())}{'; --quick: rough figures' if args.quick else ''}")
    for name in documents:
        print(f"README, {name}: {words_of(readme_record(name)['machine'])}")
    load, cores = machine.LOAD_BEFORE, os.cpu_count() or 1
    if load / cores > BUSY:
        print(f"busy: other work (load {load}) shared the cores, and ratios mean little: run it again alone")
    for line in dict.fromkeys(setting.missing):
        print(f"missing: {line}")
    for name, document in documents.items() if args.save else ():
        readme_file(name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(len(documents) < len(args.only))


if __name__ == "__main__":
    sys.exit(main())

"""The files of an MXNet checkpoint: the pair ``PREFIX-symbol.json`` and ``PREFIX-0007.params``, wherever they lie.

``mxnet:`` names it: ``mxnet:model-0007.params``, ``mxnet:model-symbol.json``, ``mxnet:model`` (the newest epoch of the
prefix), ``mxnet:model-0007``, or the name of a model of MXNet's old zoo, such as ``mxnet:resnext-50``, whose files lie
in the folder ``STEADYTRAIN_MXNET_MODELS`` or in the current one. Nothing is fetched. This needs no torch.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from steadytrain.errors import ModelError
from steadytrain.files import read_text

PREFIX = "mxnet:"
FOLDER = "STEADYTRAIN_MXNET_MODELS"
ZOO = (
    *("inception-bn", "resnet-18", "resnet-34", "resnet-50", "resnet-101", "resnet-152"),
    *("resnext-50", "resnext-101", "resnext-101-64x4d"),
)
"""Models of the old zoo on ImageNet-1k; their files are called so, or with ``imagenet1k-`` before it."""
_EPOCH = re.compile(r"-(\d{4,})$")


def find_files(name: str) -> tuple[Path, Path | None]:
    """Find the symbol that a name stands for, and its newest arrays (None without any). Raises ModelError."""
    if not name:
        raise ModelError(
            f"{PREFIX} needs the name of a checkpoint behind it: {PREFIX}model-0007.params, {PREFIX}model for the"
            f" newest epoch of that prefix, or {PREFIX}resnet-18"
        )
    path = Path(name)
    if path.suffix == ".params":
        prefix = _EPOCH.sub("", str(path.with_suffix("")))
        symbol = next((p for p in (Path(f"{prefix}-symbol.json"), path.with_suffix(".json")) if p.is_file()), None)
        if symbol is None:
            symbols = sorted(path.parent.glob("*-symbol.json")) if path.parent.is_dir() else []
            if len(symbols) != 1:
                raise ModelError(f"there is no {prefix}-symbol.json, which says what network {path} is: name it")
            symbol = symbols[0]
        if not path.is_file():
            newest = _newest(prefix)
            remedy = "check its name" if newest is None else f"name another epoch, such as {newest}"
            raise ModelError(f"there is no {path} beside {symbol}: {remedy}")
        return symbol, path
    if path.suffix == ".json":
        if not path.is_file():
            raise ModelError(f"there is no symbol {path}: check its name")
        return path, _newest(str(path).removesuffix(".json").removesuffix("-symbol"))
    folders = [Path(os.environ[FOLDER]), Path()] if os.environ.get(FOLDER) else [Path()]
    epoch = _EPOCH.search(name)
    stem = _EPOCH.sub("", name)
    plain = re.sub(r"^imagenet1?k?-", "", stem)
    names = [stem] if plain not in ZOO else list(dict.fromkeys((stem, plain, f"imagenet1k-{plain}")))
    for folder in folders:
        for stem_name in names:
            prefix = str(folder / stem_name)
            if Path(f"{prefix}-symbol.json").is_file():
                exact = Path(f"{prefix}-{epoch[1]}.params") if epoch else None
                if exact is not None and not exact.is_file():
                    raise ModelError(f"there is no {exact} beside {prefix}-symbol.json: name another epoch")
                return Path(f"{prefix}-symbol.json"), exact or _newest(prefix)
    where = " and ".join(str(folder) if folder != Path() else "the current folder" for folder in folders)
    files = " or ".join(f"{stem_name}-symbol.json" for stem_name in names)
    variable = "" if os.environ.get(FOLDER) else f" (the variable {FOLDER} names another folder)"
    raise ModelError(
        f"there is no MXNet model {name!r}: {files} was looked for in {where}{variable}; nothing is fetched, for"
        " MXNet's server is gone: put the symbol and its .params there, or give their paths"
    )


def _newest(prefix: str) -> Path | None:
    """The arrays of the last epoch; of Gluon's exports, and of files without a number, what there is."""
    folder, stem = Path(prefix).parent, Path(prefix).name
    numbered = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.suffix == ".params" and (match := _EPOCH.search(path.stem)) and path.stem == f"{stem}-{match[1]}"
    }
    if numbered:
        return numbered[max(numbered)]
    single = Path(f"{prefix}.params")
    return single if single.is_file() else None


def read_synsets(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read names of classes, and their synsets, of ``synset.txt`` in a folder; both empty where it has none.

    A line is ``n02124075 Egyptian cat, ...``, or a name alone: then there are no synsets.
    """
    path = folder / "synset.txt"
    try:
        lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        return (), ()
    pairs = [re.fullmatch(r"(n\d{8})(?:\s+(.*))?", line) for line in lines]
    if all(pairs):
        synsets = tuple(pair[1] for pair in pairs if pair)
        names = [(pair[2] or pair[1]).split(",")[0].strip() for pair in pairs if pair]
        uses = Counter(names)
        return tuple(n if uses[n] == 1 else f"{n} ({s})" for n, s in zip(names, synsets, strict=True)), synsets
    names = [line.split(",")[0] for line in lines]
    return (tuple(names), ()) if len(set(names)) == len(names) else (tuple(lines), ())

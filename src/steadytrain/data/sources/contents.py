"""What archives hold, as listings: folders of classes, samples, arrays, or a tar for each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steadytrain.data.sources import archive, cifar, imagenet, places, table, tree, truth, webdataset
from steadytrain.data.sources.container import Plain
from steadytrain.data.sources.listing import Listing, is_image
from steadytrain.data.sources.members import Members, Say, few
from steadytrain.data.sources.splits import by_split, in_order
from steadytrain.errors import DataError

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")


@dataclass(frozen=True)
class Asked:
    """What goes with a source: a file of labels, a class list, where to decompress to, and who hears remarks."""

    labels: Path | None
    classes: Sequence[str] | None
    scratch: Path
    say: Say


def list_archives(archives: Sequence[Plain], asked: Asked, *, root: Path) -> list[Listing]:
    """List one archive, or several that belong together.

    Args:
        archives: tars or zips, in their order.
        asked: what goes with them.
        root: what the user named, for messages.

    Raises:
        DataError: damaged, or nothing that can be packed.
    """
    if len(archives) == 1:
        return _list(archives, asked, root)
    groups = by_split(archives, [one.path.name for one in archives], str(root))
    if len(groups) == 1:
        return _list(archives, asked, root)
    listings: list[Listing] = []
    for split, group in in_order(groups, asked.say, str(root)).items():
        given = asked.classes or (listings[0].classes if listings else None)
        found = _list(group, replace(asked, classes=given), root)
        if len(found) > 1:
            raise DataError(f"{group[0].path} is named for one split and holds several: give it alone")
        listings.append(replace(found[0], split=split))
    return listings


def _list(archives: Sequence[Plain], asked: Asked, root: Path) -> list[Listing]:
    """List archives of one split."""
    members = archive.read(archives)
    members.tell(asked.say)
    if not members.names:
        raise DataError(f"{root} holds no files: give an archive with one folder of images for each class")
    if len(archives) == 1 and archives[0].kind == "tar" and archive.holds_archives(members):
        inner = archive.read_inner(archives[0])
        inner.tell(asked.say)
        return tree.list_tree(tree.strip(tree.grow(inner)), inner, root=root, classes=asked.classes)
    if asked.labels is not None:
        return _labelled(members, asked, root)
    if cifar.is_cifar(members.names):
        return cifar.list_batches(members, root=root, classes=asked.classes, say=asked.say)
    _refuse_arrays(members, root)
    if webdataset.is_samples(members):
        return [webdataset.list_samples(members, root=root, classes=asked.classes, say=asked.say)]
    top = tree.strip(tree.grow(members))
    if tree.is_flat(top):
        return _flat(archives, members, top, asked, root)
    return tree.list_tree(top, members, root=root, classes=asked.classes)


def _flat(archives: Sequence[Plain], members: Members, top: tree.Folder, asked: Asked, root: Path) -> list[Listing]:
    """Images without folders of classes: one archive for each class, or labels that lie beside the archive."""
    if len(archives) > 1:
        each = archive.read(archives, by_stem=True)
        return tree.list_tree(tree.grow(each), each, root=root, classes=asked.classes)
    beside = imagenet.truth_beside(root, members.names)
    if beside is None:
        return tree.list_tree(top, members, root=root, classes=asked.classes)
    return _labelled(members, replace(asked, labels=beside), root)


def _labelled(members: Members, asked: Asked, root: Path) -> list[Listing]:
    """Images with their labels in a file of their own."""
    assert asked.labels is not None
    known = truth.read_truth(asked.labels, asked.scratch, asked.say)
    if known is None:
        where = places.InArchives(members, root, table=asked.labels)
        return table.read_table(asked.labels, where, classes=asked.classes, say=asked.say)
    rows = tree.rows_in_order(tree.grow(members), members)
    names = [members.names[row] for row in rows]
    classes, labels = known.label(names, classes=asked.classes)
    return [members.listing(rows, names, labels, root=root, classes=classes)]


def _refuse_arrays(members: Members, root: Path) -> None:
    suffixes = {Path(name).suffix.lower() for name in members.names}
    if any(is_image(name) for name in members.names):
        return
    if suffixes <= {".npy", ".npz"}:
        raise DataError(f"{root} holds NumPy arrays: write their images as a folder of classes, or as idx files")
    if any("-ubyte" in name for name in members.names):
        raise DataError(f"{root} holds idx files: unpack it and give the folder")
    if inside := [name for name in members.names if name.lower().endswith(ARCHIVES)]:
        raise DataError(
            f"{root} holds archives ({few(inside, 3)}) and no images beside them: unpack it and give the folder, or"
            " give a tar of tars, each of them one class"
        )

"""Classes as they are filled: empty ones, tiny ones, uneven ones."""

from __future__ import annotations

from collections.abc import Sequence

from steadytrain.data.checking.findings import Findings

SMALL = 10
UNEVEN = 10  # times as many images in the largest class as in the smallest


def check_classes(
    classes: Sequence[str], counts: Sequence[int], found: Findings, *, required: bool = True, split: str = ""
) -> None:
    """Add what is notable about the sizes of classes.

    Args:
        classes: names.
        counts: images of each.
        found: takes the findings.
        required: whether packing refuses a class without an image.
        split: that they are counted in, to be told.
    """
    where = f" in {split}" if split else ""
    for name, count in zip(classes, counts, strict=True):
        if count == 0 and required:
            found.add("empty-class", where.strip(), name=name)
        elif count == 1:
            found.add("single-image", where.strip(), name=name)
        elif 0 < count < SMALL:
            found.add("small-class", f"{count} images{where}", name=name)
    filled = sorted((count, name) for name, count in zip(classes, counts, strict=True) if count)
    if len(filled) == 1:
        found.add("one-class", where.strip(), name=filled[0][1])
    if filled and filled[-1][0] >= UNEVEN * filled[0][0]:
        (least, small), (most, large) = filled[0], filled[-1]
        found.add(
            "imbalance", f"{large} has {most:,} images, {small} {least:,}: {most / least:,.0f} times as many{where}"
        )

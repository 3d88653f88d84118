"""Images with the same bytes are found, whatever their number and order."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.data.checking.duplicates import Fingerprints, same, shared

IMAGES = st.lists(st.integers(0, 9), max_size=40)


def _prints(images: list[int]) -> Fingerprints:
    # Half of each is the same for all: no one word of a fingerprint may decide.
    return np.array([[image % 3] * 8 + [image // 3] * 8 for image in images], np.uint8).reshape(-1, 16)


@given(IMAGES)
def test_groups_are_those_of_equal_images_in_their_order(images: list[int]) -> None:
    places = defaultdict(list)
    for number, image in enumerate(images):
        places[image].append(number)
    wanted = sorted(group for group in places.values() if len(group) > 1)
    assert [group.tolist() for group in same(_prints(images))] == wanted


@given(IMAGES, IMAGES)
def test_what_two_sets_share_is_told_once_for_each_of_the_second(ours: list[int], theirs: list[int]) -> None:
    wanted = [[ours.index(image), number] for number, image in enumerate(theirs) if image in ours]
    assert shared(_prints(ours), _prints(theirs)).tolist() == wanted

"""Classes are called by ImageNet's names, and those of a data set are found among a model's, or not at all."""

from __future__ import annotations

import pytest

from steadytrain.models.class_names import imagenet_synsets, match_classes, names_of_synsets

SYNSETS = imagenet_synsets(1000)
NAMES = names_of_synsets(SYNSETS)


@pytest.mark.parametrize("outputs", [1000, 11221, 11821, 21841, 21842, 21843])
def test_each_class_of_imagenets_classifiers_has_a_name_of_its_own(outputs: int) -> None:
    names = names_of_synsets(imagenet_synsets(outputs))
    assert len(set(names)) == len(names) == outputs


def test_other_classifiers_have_no_names() -> None:
    assert [imagenet_synsets(outputs) for outputs in (10, 512, 999, 1001)] == [()] * 4


@pytest.mark.parametrize("names", [NAMES, SYNSETS], ids=["names", "synsets"])
def test_each_class_is_found_by_its_own_name_and_by_its_synset(names: tuple[str, ...]) -> None:
    classes = match_classes(names, NAMES, synsets=SYNSETS)
    assert [match.output for match in classes] == list(range(1000))


@pytest.mark.parametrize(
    ("name", "output", "how"),
    [
        ("Egyptian cat", 285, "name"),
        ("egyptian_cat", 285, "name"),
        ("EGYPTIAN-CAT", 285, "name"),
        ("n02124075", 285, "synset"),
        ("n02124075_Egyptian_cat", 285, "synset"),
        ("n02085936-Maltese_dog", 153, "synset"),
        ("cougar", 286, "name"),
        ("puma", 286, "synonym"),
        ("cougar, puma, catamount, mountain lion, painter, panther, Felis concolor", 286, "name"),
        ("missile", 657, "name"),  # also the second name of 744, "projectile"
        ("crane (n03126707)", 517, "name"),
        ("cardigan", 474, "name"),
        ("Cardigan", 264, "name"),
        ("n99999999", None, ""),
        ("zebra crossing", None, ""),
    ],
)
def test_how_a_class_is_found_among_imagenets(name: str, output: int | None, how: str) -> None:
    (match,) = match_classes([name], NAMES, synsets=SYNSETS)
    assert (match.output, match.how) == (output, how)


@pytest.mark.parametrize(
    ("name", "candidates"), [("crane", (134, 517)), ("panther", (286, 290)), ("CARDIGAN", (264, 474))]
)
def test_a_name_of_several_classes_is_not_guessed(name: str, candidates: tuple[int, ...]) -> None:
    (match,) = match_classes([name], NAMES, synsets=SYNSETS)
    assert match.output is None and match.candidates == candidates


def test_synsets_and_names_find_each_other_whichever_the_model_has() -> None:
    of_synsets = match_classes(["tench", "Egyptian_cat"], ["n02124075", "n01440764"])
    assert [(match.output, match.how) for match in of_synsets] == [(1, "name"), (0, "name")]
    of_names = match_classes(["n01440764", "n02124075"], ["egyptian-cat", "tench", "cow"])
    assert [(match.output, match.how) for match in of_names] == [(1, "synset"), (0, "synset")]


def test_numbers_are_outputs_only_where_nothing_else_is_named() -> None:
    assert [match.output for match in match_classes(["2", "0", "3"], ["a", "b", "c"])] == [2, 0, None]
    assert [match.output for match in match_classes(["2", "a"], ["a", "b", "c"])] == [None, 0]
    assert [match.output for match in match_classes(["2", "10"], ["1", "10", "2"])] == [2, 1]  # names, not places

"""Every colour can be read on a white and on a black page."""

from __future__ import annotations

import itertools

import pytest

from memlab.views import theme


@pytest.mark.parametrize("page", theme.PAGES)
@pytest.mark.parametrize("colour", [theme.TEXT, theme.CAPACITY, theme.WARNING, *theme.SERIES.values()])
def test_what_is_written_stands_out_from_the_page(colour: str, page: str) -> None:
    assert theme.contrast(colour, page) >= 4.1


@pytest.mark.parametrize("page", theme.PAGES)
@pytest.mark.parametrize("name", theme.CATEGORIES)
def test_areas_stand_out_from_the_page(name: str, page: str) -> None:
    assert theme.contrast(theme.CATEGORIES[name], page) >= 3.0


def test_no_two_categories_look_alike() -> None:
    def distance(one: str, other: str) -> int:
        return sum(abs(a - b) for a, b in zip(theme.channels(one), theme.channels(other), strict=True))

    assert min(distance(a, b) for a, b in itertools.combinations(theme.CATEGORIES.values(), 2)) > 60
    assert min(distance(a, b) for a, b in itertools.combinations(theme.SERIES.values(), 2)) > 60


def test_contrast_is_that_of_wcag() -> None:
    assert theme.contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert theme.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the textbook example


def test_shades_and_other_names() -> None:
    assert theme.shade("#ff8000", 0.2) == "rgba(255, 128, 0, 0.2)"
    assert theme.phase_shade("other").endswith(", 0)")
    assert theme.colour_of("gradient") == theme.CATEGORIES["gradient"]
    assert theme.colour_of("layer4.1", 1) != theme.colour_of("layer4.1", 2)
    assert theme.colour_of("layer4.1", 1) == theme.colour_of("any", 1 + len(theme.PALETTE))

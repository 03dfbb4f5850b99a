"""Every colour can be read on a white and on a black page."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from memlab.analysis.curves import LAYERS
from memlab.views import theme


def linear(colour: str) -> np.ndarray:
    """Red, green and blue of a colour in the amounts of light that they are."""
    channels = np.array(theme.channels(colour)) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours as WCAG 2 defines it, from 1.0 (the same) to 21.0 (black on white)."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", theme.PAGES)
def test_what_is_written_and_areas_stand_out_from_the_page(page: str) -> None:
    for colour in (theme.TEXT, theme.CAPACITY, theme.WARNING, *theme.SERIES.values()):
        assert contrast(colour, page) >= 4.1, colour
    assert contrast(theme.ON_CAPACITY, theme.CAPACITY) >= 4.1
    for name, colour in theme.CATEGORIES.items():
        assert contrast(colour, page) >= 3.0, name


def test_no_two_categories_look_alike() -> None:
    def distance(one: str, other: str) -> int:
        return sum(abs(a - b) for a, b in zip(theme.channels(one), theme.channels(other), strict=True))

    assert min(distance(a, b) for a, b in itertools.combinations(theme.CATEGORIES.values(), 2)) > 60
    assert min(distance(a, b) for a, b in itertools.combinations(theme.SERIES.values(), 2)) > 60


# What eyes without one kind of cone see (Machado, Oliveira and Fernandes 2009, severity 1), on linear RGB.
EYES = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def oklab(colour: str, eyes: str) -> np.ndarray:
    """A colour in a space in which distances are about as large as they look (Ottosson 2020), times 100."""
    cones = [
        [0.41222147, 0.53633254, 0.05144599],
        [0.21190350, 0.68069955, 0.10739696],
        [0.08830246, 0.28171884, 0.62997870],
    ]
    mixed = [
        [0.21045426, 0.79361779, -0.00407205],
        [1.97799850, -2.42859221, 0.45059371],
        [0.02590404, 0.78277177, -0.80867577],
    ]
    return 100 * np.array(mixed) @ np.cbrt(cones @ np.clip(EYES[eyes] @ linear(colour), 0, 1))


@pytest.mark.parametrize("eyes", EYES)
def test_areas_that_may_touch_stay_apart_for_colour_blind_eyes(eyes: str) -> None:
    names = list(theme.CATEGORIES)
    nearest = min(
        (float(np.linalg.norm(oklab(theme.CATEGORIES[a], eyes) - oklab(theme.CATEGORIES[b], eyes))), a, b)
        for i, a in enumerate(names)
        for b in names[i + 1 : i + 3]  # the next one, and the one after it where that is absent
    )
    assert nearest[0] > (12 if eyes == "normal" else 6.5), nearest


def test_every_layer_has_a_colour_in_the_order_of_the_stack() -> None:
    assert tuple(theme.CATEGORIES) == LAYERS


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the textbook example


def test_shades() -> None:
    assert theme.shade("#ff8000", 0.2) == "rgba(255, 128, 0, 0.2)"
    assert tuple(theme.PHASE_COLOURS) == tuple(theme.PHASE_ALPHA) == theme.PHASES

"""The smallest GPU on which what was predicted fits, with the kernels that it has."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable

from memlab.api.prediction import Prediction
from memlab.prediction.cards import KERNELS_CHANGE, Card, cards, find
from memlab.prediction.forecast import fits_for_certain

_NEWER = "RTX 4090"
"""A card with the kernels of compute capability 8.0 and above, which are most alike."""


def smallest_card(found: Prediction, predicted: Callable[[Card], Prediction | None]) -> Prediction | None:
    """The prediction for the smallest known card on which it fits for certain, None if there is none.

    The requests of one prediction are replayed on other cards, one of each size, from those that have what is allocated at the peak
    to those that have all that it needs on its own card: a full card releases its cache, and may need less. A card of another
    compute capability has other kernels (before 8.0 attention in bfloat16 is a matrix of all scores): the first one that would
    fit is predicted by itself, and so on until one does. `predicted` gives None if the step fails there.
    """
    base: Prediction | None = found
    if found.card.compute_capability < KERNELS_CHANGE:  # newer cards need less: all of them would be missed
        base = predicted(find(_NEWER))
    if base is None:
        return None
    own: dict[tuple[int, int], Prediction | None] = {one.card.compute_capability: one for one in (base, found)}
    preferred = sorted(cards.values(), key=lambda card: (card.compute_capability not in own, card.name), reverse=True)
    known = [card for _, card in sorted({card.usable_range: card for card in preferred}.items())]
    fits = functools.cache(lambda place: fits_for_certain(base.requests(), known[place], base.conf, base.others))
    least, most = base.allocated_bytes.low, base.peak_device_bytes.high
    low = next((place for place, card in enumerate(known) if card.usable_high_bytes >= least), len(known))
    high = next((place for place, card in enumerate(known) if card.usable_bytes >= most), len(known))
    for card in known[bisect.bisect_left(range(len(known)), True, low, high, key=fits) :]:
        if card.compute_capability not in own:
            own[card.compute_capability] = predicted(card)
        one = own[card.compute_capability]
        if one is not None and fits_for_certain(one.requests(), card, one.conf, one.others):
            return one.for_card(card)
    return None

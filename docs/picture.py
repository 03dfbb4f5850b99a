"""python docs/picture.py: predict the run on the first page of the repository, and write its picture, docs/peak.svg."""

from __future__ import annotations

from pathlib import Path

import memlab


def two_steps() -> None:
    """Two training steps of GPT-2 small as its paper has it, but for the batch."""
    from memlab.workloads import gpt2

    step = gpt2(batch=4)
    step()
    step()


if __name__ == "__main__":
    prediction = memlab.predict(two_steps, card="RTX 4060", name="GPT-2 small, batch 4, two steps")
    picture = prediction._repr_mimebundle_()["image/svg+xml"]
    (Path(__file__).parent / "peak.svg").write_text(picture + "\n", "utf-8")
    print(prediction)

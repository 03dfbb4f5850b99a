"""The Lab: choose a workload, techniques to switch on and a device, run it, and see what was really saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memlab import torch_internals
from memlab.errors import MemlabError
from memlab.lab.session import LabSession
from memlab.lab.state import LabChoices
from memlab.torch_internals.traceback import running_shell
from memlab.views.shown import print_text
from memlab.workloads.workload import Workload


class Lab(LabSession):
    """`lab = memlab.Lab()`: show it in a notebook, or drive it by `state`, `run()`, `comparison`, `table`.

    `workload` is the name of one, a Workload, or a function of your own that gives model, optimizer, batch and loss;
    `workloads` a dict of such functions by name. Anything of `state` can be given by name: `Lab("gpt", card="RTX 4060")`.
    """

    def __init__(
        self,
        workload: str | Workload | Callable[[], Any] | None = None,
        *,
        workloads: Mapping[str, Callable[[], Any]] | None = None,
        **state: Any,
    ) -> None:
        own = dict(workloads or {})
        if workload is not None and not isinstance(workload, str):
            if not callable(workload):
                raise MemlabError(
                    f"a workload is a name, or a function of model, optimizer, batch and loss, got {workload!r:.80}."
                )
            name = str(workload.name if isinstance(workload, Workload) else getattr(workload, "__name__", "mine"))
            own, workload = {name: workload, **own}, name
        super().__init__(LabChoices(own), {**({"workload": workload} if workload is not None else {}), **state})

    def _ipython_display_(self) -> None:
        """Controls, and below them the result; text outside notebooks."""
        if not torch_internals.is_kernel(running_shell()):
            print_text(str(self))
            return
        from memlab.lab.view import LabView  # imported late: no widgets without a notebook

        if self.listener is not None:
            self.listener.close()
        self.listener = LabView(self)
        self.listener.open()

"""A directive whose code is run when the site is built, and shown with its result: no picture is drawn by hand."""

from __future__ import annotations

import multiprocessing
import re
from multiprocessing.pool import AsyncResult
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from page_run import Shown, run_page
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

_BLOCK = re.compile(r"^```\{executed\}\n(?::\w+:[^\n]*\n)*(.*?)^```$", re.MULTILINE | re.DOTALL)
_SEEN = "memlab-blocks"
_LIMIT_S = 300.0
_pages: dict[str, tuple[tuple[str, ...], AsyncResult[list[Shown]]]] = {}
"""Page -> its blocks and what they show; not in Sphinx's environment, which is pickled."""


class Executed(SphinxDirective):
    """The directive `executed`; with `:hide:` only the result is shown."""

    has_content = True
    option_spec = {"hide": directives.flag}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        """The code and what came of it; an error in it ends the build."""
        number = self.env.current_document.setdefault(_SEEN, 0)
        self.env.current_document[_SEEN] = number + 1
        blocks, results = _pages[self.env.docname]
        done, code = results.get(_LIMIT_S)[number], "\n".join(self.content).strip("\n")
        if blocks[number].strip("\n") != code:
            raise self.error("this block was not found in the text of the page, so another one was run")
        shown: list[nodes.Node] = [] if "hide" in self.options else [nodes.literal_block(code, code, language="python")]
        shown += [nodes.literal_block(text, text, language="text") for text in (done.printed, done.text) if text]
        if done.html:
            shown.append(nodes.raw("", f'<div class="result">{done.html}</div>', format="html"))
        return shown


def _start(app: Sphinx, env: BuildEnvironment, names: list[str]) -> None:
    """Start running the pages, two at a time, each in a process that begins with torch imported and nothing else."""
    texts = {name: env.doc2path(name).read_text("utf-8") for name in names}
    blocks = {name: tuple(_BLOCK.findall(text)) for name, text in texts.items() if "```{executed}" in text}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "memlab.api.track"])
    pool = context.Pool(2, maxtasksperchild=1)
    _pages.update((name, (page, pool.apply_async(run_page, (page,)))) for name, page in blocks.items())
    pool.close()


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("executed", Executed)
    app.connect("env-before-read-docs", _start)
    return {"parallel_read_safe": False}

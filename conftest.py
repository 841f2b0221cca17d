"""README.md and the pages of docs/ are tests: a page's Python blocks run in order, as a module, in an empty folder."""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from sybil import Document

ROOT = Path(__file__).parent


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Every markdown file that the documentation is made of."""
    if file_path.suffix == ".md" and (file_path == ROOT / "README.md" or ROOT / "docs" in file_path.parents):
        return PageFile.from_parent(parent, path=file_path)
    return None


class PageFile(pytest.File):
    """A page; it is one test, since its blocks build on each other."""

    def collect(self) -> Iterator[pytest.Item]:
        """The page itself, where it has Python blocks."""
        # Tests of a GPU are run on machines that have pytest and little else.
        from sybil import Document
        from sybil.parsers.markdown import PythonCodeBlockParser

        document = Document.parse(str(self.path), PythonCodeBlockParser())
        if document.regions:
            yield Page.from_parent(self, name="blocks", document=document)


class Page(pytest.Item):
    """The blocks of one page."""

    def __init__(self, *, document: "Document", **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.document = document

    def runtest(self) -> None:
        """Run the blocks as one module, so that classes defined in them can be found by name."""
        module = ModuleType(f"page_{self.path.stem}")
        self.document.namespace = vars(module)
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.delenv("CAVEAT_DATA", raising=False)  # a page sees no data sets but those that it makes
            patch.setenv("XDG_CACHE_HOME", folder)
            patch.setenv("XDG_STATE_HOME", folder)
            patch.setitem(sys.modules, module.__name__, module)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # the networks of the pages are too small for more
            try:
                for example in self.document.examples():
                    example.evaluate()
            finally:
                torch.set_num_threads(threads)

    def reportinfo(self) -> tuple[Path, int, str]:
        """What to call the page in reports."""
        return self.path, 0, str(self.path.relative_to(ROOT))

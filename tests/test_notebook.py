"""The tutorial notebook runs, and shows an answer, a check, a comparison and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "tutorial.ipynb"


@pytest.fixture(scope="module")
def executed() -> Any:
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": "."}}
    ).execute()
    return notebook


def shown(notebook: Any, kind: str) -> list[str]:
    """Everything that cells show in one format."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


@pytest.mark.filterwarnings("ignore")  # of the client's own event loop
def test_an_answer_a_check_a_comparison_and_a_plot(executed: Any) -> None:
    pages = shown(executed, "text/html")
    assert any("srcdoc=" in page for page in pages)  # the answer
    assert any('class="word flagged' in page and ">zebra</span>" in page for page in pages)  # the check
    assert any("revisit:alpha=1e-4" in page and "<table" in page for page in pages)  # the comparison
    assert len(shown(executed, "image/png")) >= 2  # the image and the plot
    printed = "".join(
        output["text"] for cell in executed.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert "instead of" in printed

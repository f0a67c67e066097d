"""The version has one source, release files agree with it, and workflows pin what they run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import revisit

ROOT = Path(__file__).parents[1]


def test_the_change_log_and_the_citation_are_of_this_version() -> None:
    dated = re.search(
        rf"^## {re.escape(revisit.__version__)} \((\d{{4}}-\d\d-\d\d)\)$",
        (ROOT / "CHANGELOG.md").read_text("utf-8"),
        re.M,
    )
    assert dated is not None
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["version"], str(citation["date-released"])) == (revisit.__version__, dated.group(1))


@pytest.mark.parametrize("file", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda file: file.name)
def test_actions_are_pinned_by_commit_and_tools_by_version(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text("utf-8"))["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    assert [step["uses"] for step in steps if not re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40))] == []
    if file.name == "newest.yml":  # installs the newest releases on purpose
        return
    tools = re.findall(r"(?:pip install|pipx run) (?!.*-e )(.+)", "\n".join(step.get("run", "") for step in steps))
    words = [word for line in tools for word in line.partition("&&")[0].split()]
    assert [word for word in words if "==" not in word and not word.startswith("dist/")] == []

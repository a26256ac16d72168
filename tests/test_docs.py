"""What the documentation tells people to run, runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["docs/write-your-own-rule.md"])
def test_every_python_block_of_a_page_runs(page, tmp_path):
    """One after the other, in a process of its own: the run-time check of types cannot be traced."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len(blocks) >= 4
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(p.name for p in (ROOT / "docs").glob("*.md"))])
def test_every_link_to_a_file_has_its_file(page):
    path = next(each for each in (ROOT / page, ROOT / "docs" / page) if each.exists())
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in link or (path.parent / link).exists(), link

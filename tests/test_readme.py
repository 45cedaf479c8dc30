"""The README is true: its snippets run in the order they stand, its settings are all there are."""

import os
import re
import sys
from pathlib import Path

from ltc_core.settings import SETTINGS
from tests import prepared

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
SETTINGS_PAGE = (ROOT / "docs" / "settings.md").read_text()


def test_snippets_run(tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(snippets) == 5
    (tmp_path / "snippets.py").write_text("\n".join(snippets))
    done = prepared.run(
        [sys.executable, "-W", "error", "snippets.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_settings_table_is_complete() -> None:
    rows = re.findall(r"^\| `(LTC_\w+)` \| [^|]* \| (.*) \|$", SETTINGS_PAGE, re.MULTILINE)
    assert rows == [(row.env, row.doc) for row in SETTINGS]


def test_commands_exist() -> None:
    commands = set(re.findall(r"(?:`|^    )make (\w+)", TEXT, re.MULTILINE))
    rules = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= commands <= rules


def test_files_exist() -> None:
    for name in re.findall(r"`((?:examples|\.ci)/[\w./]+)`", TEXT):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+\.py)`", TEXT):
        assert (ROOT / "examples" / name).exists(), name

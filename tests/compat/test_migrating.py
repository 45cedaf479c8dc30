"""docs/migrating.md has the tables that the package prints."""

import re
import sys
from pathlib import Path

from tests import prepared

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrating.md"


def test_the_tables_are_those_of_the_package() -> None:
    command = [sys.executable, "-W", "error", "-m", "ltc_dist.compat", "--names"]
    done = prepared.run(command, cwd=ROOT, capture_output=True, text=True)
    names, variables = done.stdout.strip().split("\n\n")
    text = PAGE.read_text()
    for mark, printed in (("names", names), ("variables", variables)):
        found = re.search(rf"<!-- {mark} -->\n(.*)\n<!-- /{mark} -->", text, re.DOTALL)
        assert found and found[1] == printed, (
            f"python -m ltc_dist.compat --names prints other {mark}"
        )
    assert "`xla_device`" in names and "`LTC_DEBUG`" in variables

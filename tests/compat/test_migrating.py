"""docs/migrating.md has the tables that the package prints."""

import re
from pathlib import Path

from tests.compat.running import run

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


def test_the_tables_are_those_of_the_package(tmp_path: Path) -> None:
    names, variables = run(tmp_path, "", "-m", "ltc_dist.compat", "--names").strip().split("\n\n")
    text = PAGE.read_text()
    for mark, printed in (("names", names), ("variables", variables)):
        found = re.search(rf"<!-- {mark} -->\n(.*)\n<!-- /{mark} -->", text, re.DOTALL)
        assert found and found[1] == printed, (
            f"python -m ltc_dist.compat --names prints other {mark}"
        )
    assert "`xla_device`" in names and "`LTC_DEBUG`" in variables

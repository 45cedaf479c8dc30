"""The tier `parts` finds compiled code that is wrong, in the part where it is wrong."""

import re

from tests.core import child

# A write at indices, then one by a mask of the whole: without a repair the compiler mixes them up.
PRELUDE = """
import torch, warnings
warnings.simplefilter("ignore")  # of the compiler
from ltc_core.executors.inductor.lowering import mutation_repair, repairs
from tests.nets.tiers import tier
def written():
    x, index = torch.arange(12.0).to("ltc"), torch.tensor([1, 3]).to("ltc")
    y = x * 2
    y[index] = x[:2] + 9
    y[y > 8] = 0
    return y.sum().item()
"""


def test_values_are_those_of_the_graph() -> None:
    code = """
    with tier("parts"):
        found = written()
    with tier("ops"):
        print(found == written())
    """
    out, _ = child.run(code, prelude=PRELUDE)
    assert out == "True\n"


def test_what_is_wrong_is_named() -> None:
    code = """
    repairs._REPAIRS = tuple(each for each in repairs._REPAIRS if each is not mutation_repair.repaired)
    with tier("parts"):
        try:
            written()
        except BaseException as error:
            print(error)
    """
    out, _ = child.run(code, prelude=PRELUDE)
    assert re.search(r"output \d+: tensor(.|\n)*instead of tensor(.|\n)*index_put", out), out

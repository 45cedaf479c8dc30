"""What the documents name is there: files, folders, classes, functions, make's commands."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("docs/architecture.md", "docs/recording.md", "CONTRIBUTING.md")
FOLDERS = (
    "",
    "ltc_core",
    "ltc_dist",
    "launch",
    "docs",
    "ltc_core/executors/inductor",
    "ltc_core/executors/reference",
    "ltc_core/program",
    "ltc_core/record",
    "ltc_core/record/csrc",
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def words_of(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text_of(page))


@functools.cache
def defined() -> frozenset[str]:
    """Names that the packages define: classes, functions, attributes, types of C++."""
    found = set()
    for folder in ("ltc_core", "ltc_dist", "launch"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix == ".py":
                text = path.read_text()
                found.update(re.findall(r"(?:class|def) (\w+)", text))
                found.update(
                    w for line in re.findall(r"import (.+)", text) for w in re.findall(r"\w+", line)
                )
                found.update(
                    re.findall(r"^\s*(?:self\.)?(\w+)(?::[^=\n]*)?(?: =|$)", text, re.MULTILINE)
                )
            elif path.suffix in (".cpp", ".h"):
                found.update(re.findall(r"\b(\w+)\b", path.read_text()))
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES)
def test_files_are_there(page: str) -> None:
    named = re.findall(r"(?<![\w/.-])((?:[\w.]+/)*\w+\.(?:py|cpp|h|md))\b", text_of(page))
    named += [word for word in words_of(page) if re.fullmatch(r"(?:\w+/)+", word)]
    assert named
    missing = [n for n in named if not any((ROOT / folder / n).exists() for folder in FOLDERS)]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_names_are_there(page: str) -> None:
    words = [re.sub(r"\(.*\)$", "", word).replace("::", ".") for word in words_of(page)]
    names = [
        w
        for w in words
        if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", w) and not w.endswith((".py", ".md", ".cpp", ".h"))
    ]
    ours = [w for w in names if not w.startswith(("ltc-", "torch", "LTC_", "python"))]
    missing = [w for w in ours if w.split(".")[-1] not in defined() | KNOWN and w not in KNOWN]
    assert not missing


# What is not defined by the packages: names of PyTorch, and short names that scripts use.
KNOWN = frozenset(
    """
    __torch_dispatch__ meta ltc_core ltc_launch elastic_launch async latest LTC_X LTC_ clone resize_ set_ t_ nonzero
    scaled_dot_product_attention index_select materialize nn.Parameter nn.LazyLinear nn.TransformerEncoder
    RandomSampler DistributedSampler OpOverload manifest.json pjrt _utils torch_xla_py xm xmp xf xp xr xu
    xser pl dp met ltm
    """.split()
)


def modules() -> list[Path]:
    return [
        p for folder in ("ltc_core", "ltc_dist", "launch") for p in (ROOT / folder).rglob("*.py")
    ]


def test_docstrings_of_modules_name_what_is_there() -> None:
    """So that whoever follows "called by" finds a file."""
    there = (
        {path.stem for path in modules()}
        | {path.parent.name for path in modules()}
        | KNOWN
        | defined()
    )
    missing = []
    for path in modules():
        for word in re.findall(
            r"`([A-Za-z_][\w.]*)`", ast.get_docstring(ast.parse(path.read_text())) or ""
        ):
            if (
                word not in there
                and word.split(".")[-1] not in there
                and not word.startswith("torch.")
            ):
                missing.append(f"{path.relative_to(ROOT)}: {word}")
    assert not missing


def test_commands_of_make_are_there() -> None:
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"`make ([\w-]+)", text_of(page))) <= rules, page

"""The README is true: its example runs and prints what it says, its names and files exist."""

from __future__ import annotations

import ast
import contextlib
import io
import pathlib
import re

import pytest

import replayssm_cupy as ssm
from replayssm_cupy import keys
from replayssm_cupy.__main__ import main

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def block(mark: str) -> str:
    """The fenced block behind an HTML comment."""
    found = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", README, re.S)
    assert found, f"README has no block {mark!r}"
    return found[1]


def test_example_prints_what_it_says():
    code = block("example")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    said = re.search(r"print\(.*\)  # (\[[\d ]+\])", code)
    assert said is not None
    assert printed.getvalue().strip() == said[1]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_examples_of_the_frameworks(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    code, printed = block(f"{framework} example"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    said = re.search(r"print\(.*\)  # (\[.*\])", code)
    assert said is not None
    assert printed.getvalue().strip() == said[1]


def test_errors_of_the_glossary_exist():
    rows = README.split("## Errors")[1].split("\n\n")[2].split("\n")[2:]
    sources = " ".join(path.read_text() for path in (ROOT / "replayssm_cupy").glob("*.py"))
    joined = re.sub(r'"\s+f?"', "", sources)  # messages over several lines
    quotes = [quote for row in rows for quote in re.findall(r"`(.*?)`", row.split("|")[1])]
    assert len(quotes) > 10
    for quote in quotes:
        for part in re.split(r"\(batch, \.\.\.\) = \.\.\.|\.\.\.", quote):
            assert part.strip() in joined, quote


def test_commands():
    demo, test = block("demo command").strip(), block("test command").strip()
    assert demo == "pip install '.[demo]' && python -m replayssm_cupy demo"
    assert test == "pip install -e '.[test,cuda13]' && pytest -n auto --dist worksteal"
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extra in set(re.findall(r"\.\[([\w,]+)\]", README)):
        for name in extra.split(","):
            assert re.search(rf"^{name} = \[", pyproject, re.M), name


def test_functions_of_the_table_are_the_public_ones():
    table = README.split("## Functions")[1].split("\n\n")[1]
    named = set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.split("\n"))))
    assert named == set(ssm.__all__) - {"ReplaySSMError"}
    table = README.split("| in `jax_ops` |")[1].split("\n\n")[0]
    named = set(
        re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.split("\n")[1:]))
    )
    tree = ast.parse((ROOT / "replayssm_cupy" / "jax_ops.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert named == {name for name in functions if not name.startswith("_")}


def test_support_table_is_what_the_keys_say():
    table = README.split("## What is supported")[1]
    for dtype in keys.STATE_DTYPES:
        assert dtype in table
    row = next(line for line in table.split("\n") if line.startswith("| head_dim"))
    numbers = [[int(n) for n in part.split(", ")] for part in re.findall(r"\d+(?:, \d+)+", row)]
    assert numbers == [list(keys.HEAD_DIMS), list(keys.DSTATES)]


def test_files_and_variables_exist():
    for path in re.findall(r"`?((?:benchmarks|tests|cuda)/[\w/.]+\w)`?", README):
        assert (ROOT / path).exists(), path
    sources = "".join(
        path.read_text()
        for folder in ("replayssm_cupy", "tests")
        for path in (ROOT / folder).rglob("*.py")
    )
    for variable in re.findall(r"`(REPLAYSSM_\w+)`", README):
        assert f'"{variable}"' in sources, variable


@pytest.mark.parametrize("command", [["--help"], ["demo", "--help"], ["kernels", "--help"]])
def test_commands_answer(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for option in re.findall(r"`(--[\w-]+)", README):
        if command[0] == "demo" and option not in ("--arch", "--layout", "--help"):
            assert option in said, option

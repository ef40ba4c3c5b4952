"""The documentation: its Python runs, its links lead somewhere, its messages, numbers and tables are true."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import json
import operator
import re
import sys

import pytest
import torch
from conftest import ROOT, load_script

import lowbatch_lmhead
from lowbatch_lmhead import backends, devices, testing
from lowbatch_lmhead.backends import flashinfer

DOCS = ROOT / "docs"
SOURCES = ROOT / "src" / "lowbatch_lmhead"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"]}
RUN_ELSEWHERE = {"engines.md"}  # by tests/adapters/test_engine_example.py


def blocks(text):
    """The Python of a page, each block at its line of the page."""
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def prose(text):
    """Without code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def names(paths):
    return [path.name for path in paths]


# --- Python ---


WITH_PYTHON = [path for path in PAGES if blocks(TEXTS[path]) and path.name not in RUN_ELSEWHERE]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=names(WITH_PYTHON))
@pytest.mark.parametrize("served", [False, True], ids=["default GEMM", "kernel"])
def test_python_blocks_run(path, served, capsys):
    """In order and in one namespace, as a reader without a GPU runs them, and with a backend that serves the CPU."""
    if served and (torch.cuda.is_available() or "reference_backend(" in TEXTS[path]):
        pytest.skip("the reference backend serves the CPU, or the page registers one itself")
    namespace = {"__name__": "example"}
    with testing.reference_backend() if served else contextlib.nullcontext():
        for block in blocks(TEXTS[path]):
            exec(compile(block, str(path), "exec", dont_inherit=True), namespace)


def test_the_example_of_numerics_finds_the_mistake(capsys):
    block = blocks(TEXTS[DOCS / "numerics.md"])[0]
    exec(compile(block, "numerics.md", "exec", dont_inherit=True), {"__name__": "example"})
    found = "1 of 2000 logits differ from the default GEMM, the first of row 1 at vocabulary row 999"
    assert found in capsys.readouterr().out


# --- links ---


def slug(heading):
    """The anchor of a heading, as Python-Markdown's toc and GitHub make it of plain words."""
    words = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())


def anchors(path):
    text = prose(TEXTS[path]) if path in TEXTS else ""
    found = {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    return found | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))  # mkdocstrings' headings


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    if not RESULTS.exists():
        pytest.skip("a source distribution has no results")
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(TEXTS[path])):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.is_file() or ROOT not in target.parents or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^  - [^:]+: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert set(listed) - {"readme.md", "changelog.md"} == set(names(PAGES))
    assert all(f"]({name})" in TEXTS[DOCS / "index.md"] for name in names(PAGES) if name != "index.md")


# --- API ---


def test_every_public_name_is_in_the_api():
    documented = set(re.findall(r"^::: (\S+)$", TEXTS[DOCS / "api.md"], re.MULTILINE))
    public = {f"lowbatch_lmhead.{name}" for name in lowbatch_lmhead.__all__ if name != "__version__"}
    assert public <= documented
    for name in documented:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("function", ["project", "bind", "warmup", "autotune", "register_head"])
def test_every_parameter_is_documented(function):
    """By the docstring, from which the page is made."""
    function = getattr(lowbatch_lmhead, function)
    described = re.findall(r"^    (\w+): ", inspect.getdoc(function), re.MULTILINE)
    assert [name for name in described if name != "ValueError"] == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", ["Decision", "report.HeadReport", "TunedHead", "TunedRow"])
def test_every_field_is_in_the_api(name):
    path = f"lowbatch_lmhead.{name}"
    described = TEXTS[DOCS / "api.md"].partition(f"::: {path}\n")[2].partition("\n::: ")[0]
    table = [row.split(" | ")[0] for row in described.splitlines() if row.startswith("| `")]
    listed = [field for row in table for field in re.findall(r"`(\w+)`", row)]
    assert listed == [field.name for field in dataclasses.fields(operator.attrgetter(name)(lowbatch_lmhead))]


# --- messages ---


def template(node):
    """A string of the sources with {} for each value in it, or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = re.sub(r"%[sdr]", "{}", node.value)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    else:
        return None
    return " ".join(text.split())


def parsed():
    """(path, syntax tree) of each module, without docstrings."""
    for path in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [
                    one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
                ]
        yield path, tree


TREES = list(parsed())


def quoted():
    """The messages that troubleshooting.md quotes: code with more than one word."""
    text = prose(TEXTS[DOCS / "troubleshooting.md"])
    items = re.findall(r"^- (.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    said = [" ".join(code.split()) for item in items for code in re.findall(r"`([^`]+)`", item)]
    return [re.sub(r"\{\w+\}", "{}", one) for one in said if " " in one]


# Code in the explanations that is no message.
NO_MESSAGES = (
    "lowbatch-lmhead ",
    "compile --tuning",
    "autotune(..., refresh=True)",
    "project(head.weight, x)",
    "chmod go-w",
)


def test_quoted_messages_are_in_the_sources():
    known = [text for _, tree in TREES for node in ast.walk(tree) if (text := template(node))]
    missing = [
        message
        for message in quoted()
        if not message.startswith(NO_MESSAGES) and not any(message in text for text in known)
    ]
    assert not missing


SAYS = {"ValueError", "warn_once", "warning", "UsageError", "_Useless", "leave"}
REASONS = {
    *("supports", "_unusable", "distrust", "_why_not", "_reason_against", "_device_reasons"),
    *("_own_forward", "_parametrized", "_unknown_interface", "_difference"),
}


def said():
    """(module, message) of what the package says to people: errors, warnings, reasons."""
    registered = {sys.modules[type(backend).__module__].__file__ for backend in backends.kernels()}
    shared = {"__init__.py", "base.py", "compiling.py", "default_gemm.py", "flashinfer.py"}
    for path, tree in TREES:
        if path.name == "testing.py" or (
            path.parent.name == "backends" and path.name not in shared and str(path) not in registered
        ):
            continue
        for node in ast.walk(tree):
            found = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in SAYS or (name == "append" and path.name in ("gate.py", "head.py")):
                    found = node.args[:1]
            elif isinstance(node, ast.FunctionDef) and node.name in REASONS:
                values = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]
                found = [part for value in values for part in (getattr(value, "elts", None) or [value])]
            for one in found:
                text = template(one)
                if text and re.search(r"[a-z]{2}", text.replace("{}", "")):
                    yield f"{path.relative_to(SOURCES)}", text


def test_every_message_is_explained():
    """What is missing here is to be added to docs/troubleshooting.md: what it means, and what to do."""
    long_enough = [message for message in quoted() if len(message) >= 8]
    missing = {
        (module, text)
        for module, text in said()
        if not any(message in text and 2 * len(message) >= len(text) for message in long_enough)
    }
    assert not missing


# --- tables and numbers ---


def test_coverage_is_up_to_date():
    """``python docs/coverage.py`` writes it."""
    if flashinfer.unusable():
        pytest.skip(flashinfer.unusable())
    assert TEXTS[DOCS / "coverage.md"] == load_script(DOCS / "coverage.py").page()


def test_every_backend_is_in_the_table_of_backends():
    text = TEXTS[DOCS / "backends.md"]
    short = {name: name.removesuffix("a").replace("sm_", "SM") for name in devices.ARCHITECTURES}
    for backend in backends.kernels():
        lines = re.search(rf"^\| {re.escape(backend.name)} \|.*\n(?:\| \|.*\n)*", text, re.MULTILINE)
        assert lines, backend.name
        assert set(re.findall(r"SM\d+", lines[0])) == {short[name] for name in backend.architectures if name in short}


def test_the_batch_invariant_kernels_are_named():
    text = TEXTS[DOCS / "numerics.md"].partition("\n## Batch invariance\n")[2].partition("\n## ")[0]
    for backend in backends.kernels():
        assert (f"`{backend.name}`" in text) == hasattr(backend, "invariant_tactic"), backend.name


def test_every_environment_variable_is_explained():
    text = TEXTS[DOCS / "tuning.md"]
    known = {node for _, tree in TREES for node in map(template, ast.walk(tree)) if node}
    for variable in (name for name in known if re.fullmatch(r"LOWBATCH_LMHEAD_\w+", name)):
        assert f"| `{variable}` |" in text


@pytest.mark.parametrize("page", ["numerics.md", "float32.md"])
def test_numbers_are_those_of_the_results(page):
    """Each number in a page that is listed here, from the file that the page cites."""
    if not RESULTS.exists():
        pytest.skip("a source distribution has no results")
    core, tuned = (json.loads((RESULTS / "h200" / name).read_text()) for name in ("core.json", "tuned.json"))
    text = TEXTS[DOCS / page]
    if page == "float32.md":
        summary = core["summary"]
        for key in ("float32 us / bfloat16 us, geometric mean", "float32 us / bfloat16 us, largest"):
            assert f"{summary[key]:.2f}" in text
        assert f"{summary['float32 us / upcast_us, largest']:.2f}" in text
        for key in ("rel_err bfloat16, largest", "rel_err float32, largest"):
            assert number(summary[key]) in text
        return
    for source, result, kernels in (("untuned", core, True), ("tuned", tuned, True), ("", tuned, False)):
        for dtype in ("bfloat16", "float32"):
            rows = [
                row
                for row in result["rows"]
                if row["out_dtype"] == dtype and (row["backend"] != "default GEMM") == kernels
            ]
            who = f"kernels, {dtype} logits, {source}" if kernels else f"default GEMM, {dtype} logits"
            if not rows:
                assert not kernels
                assert f"| {who} |" not in text
                continue
            largest, last = (number(max(row[key] for row in rows)) for key in ("rel_err", "last_rows_err"))
            assert f"| {who} | {largest} | {last} |" in text


def number(value):
    """``0.00168`` -> ``1.7e-3``."""
    return f"{value:.1e}".replace("e-0", "e-")

"""Every test asserts something, and every skip and expected failure says why."""

import ast

import pytest

from tests.meta.source_tree import ROOT, parse, suites

CHECKING_CALLS = {"raises", "fail", "warns"}
CHECKING_PREFIXES = ("check_", "assert_", "_check_", "_assert_")
SHRUGS = {"skip", "skipif", "xfail"}


def asserts_something(function, tree):
    """Whether a test function holds an assertion: a statement, a pytest check, or a helper that holds one.

    A helper counts by its body where this file defines it, else by a name that says that it checks.
    """
    helpers = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    waiting, seen = [function], {function.name}
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
                return True
            if isinstance(node, ast.Call):
                name = _called(node)
                if name in CHECKING_CALLS or (name not in helpers and name.startswith(CHECKING_PREFIXES)):
                    return True
                if name in helpers and name not in seen:
                    seen.add(name)
                    waiting.append(helpers[name])
    return False


def cases_in(tree):
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]


def shrugs_without_a_reason(tree):
    """Lines of skips and expected failures that give no reason."""
    bare = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _is_shrug(node.func) and not node.args and not _reason(node)
    ]
    for node in ast.walk(tree):
        decorators = getattr(node, "decorator_list", [])
        bare += [d.lineno for d in decorators if isinstance(d, ast.Attribute) and _is_shrug(d)]
    return bare


def test_every_test_asserts_something():
    empty = [
        f"{path.relative_to(ROOT)}:{function.lineno}: {function.name}"
        for path in suites()
        for function in cases_in(parse(path))
        if not asserts_something(function, parse(path))
    ]
    assert empty == []


def test_every_skip_has_a_reason():
    bare = [f"{path.relative_to(ROOT)}:{line}" for path in suites() for line in shrugs_without_a_reason(parse(path))]
    assert bare == []


@pytest.mark.parametrize(
    "text",
    [
        "def test_x(): f()",
        "def test_x(): assert True",
        "def test_x(): assert 'always'",
        "def test_x(): h()\ndef h(): x = 1",
        "def test_x(): check_it()\ndef check_it(): test_x()",
    ],
)
def test_an_empty_test_is_seen(text):
    tree = ast.parse(text)
    assert not asserts_something(cases_in(tree)[0], tree)


@pytest.mark.parametrize(
    "text",
    [
        "def test_x(): assert x == 1",
        "def test_x(): check_trace(x)",
        "def test_x():\n    with pytest.raises(E): f()",
        "def test_x(): h()\ndef h(): g()\ndef g(): assert y",
    ],
)
def test_a_real_test_is_seen(text):
    tree = ast.parse(text)
    assert asserts_something(cases_in(tree)[0], tree)


@pytest.mark.parametrize("text", ["pytest.skip()", "@pytest.mark.skip\ndef test_x(): f()", "pytest.mark.xfail()"])
def test_a_bare_skip_is_seen(text):
    assert shrugs_without_a_reason(ast.parse(text)) != []


def _called(node):
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def _is_shrug(node):
    return isinstance(node, ast.Attribute) and node.attr in SHRUGS and "pytest" in ast.unparse(node.value)


def _reason(node):
    return any(keyword.arg == "reason" for keyword in node.keywords)

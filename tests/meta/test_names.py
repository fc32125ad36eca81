"""One name, one thing; and no function that takes a bag of arguments."""

import ast
from collections import defaultdict

from tests.meta.source_tree import ROOT, modules, parse

MOST_PARAMETERS = 9
# What a library or a published interface fixes: DeepEP's buffers, the exchange of a DCP group.
FIXED_ELSEWHERE = {
    "dbo/dcp/exchange.py:dcp_a2a_lse_reduce",
    "sim/alltoall/elastic.py:dispatch",
    "sim/alltoall/high_throughput.py:dispatch",
}


def public_classes():
    """Where each public class of the product is defined."""
    found = defaultdict(list)
    for path in modules():
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    return found


def crowded_functions():
    """Functions outside of kernels with more parameters than a reader holds in mind."""
    found = set()
    for path in modules():
        if "kernels" in path.parts:
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                args = node.args
                count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
                count += (args.vararg is not None) + (args.kwarg is not None)
                if count > MOST_PARAMETERS:
                    found.add(f"{path.relative_to(ROOT)}:{node.name}")
    return found


def test_no_two_public_classes_share_a_name():
    assert {name: files for name, files in public_classes().items() if len(files) > 1} == {}


def test_no_function_takes_a_bag_of_arguments():
    assert crowded_functions() == FIXED_ELSEWHERE

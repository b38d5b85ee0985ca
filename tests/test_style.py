"""Size budgets: they keep files and functions readable, so a breach is a failure."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cute_moe", "host", "kernels")
EVERYWHERE = (*PACKAGES, "tests", "perf")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150
MAX_PARAMETERS = 8
# The public entry point keeps the signature that existing callers use; its references and its
# launch have one parameter for each of its tensors.
LONG_SIGNATURES = {
    "mono_moe", "fused_experts", "from_checkpoint", "moe_fp32", "moe_block_fp8", "launch",
    "launch_moe", "launch_fused_experts",
}  # fmt: skip
MIN_COPIED_LINES = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(folders: tuple[str, ...]) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def functions(folders: tuple[str, ...]) -> Iterator[tuple[str, Function]]:
    """Every function with its place, such as "host/check.py:12 check"."""
    for path in files(folders):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def is_kernel(node: Function) -> bool:
    """Whether `@cute.kernel`, with or without arguments, decorates it."""
    names = [ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list]
    return "cute.kernel" in names


def own_lines(node: Function) -> int:
    """Lines from the first statement after the docstring to the end."""
    body = statements(node)
    return node.end_lineno - body[0].lineno + 1 if body else 0


def statements(node: Function) -> list[ast.stmt]:
    """The body without its docstring."""
    body = node.body
    return body[1:] if ast.get_docstring(node) is not None else body


def test_files_are_short() -> None:
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in files(EVERYWHERE)
    }
    long = {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short() -> None:
    long = {}
    for place, node in functions(EVERYWHERE):
        limit = MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES
        if own_lines(node) > limit:
            long[place] = own_lines(node)
    assert not long, f"over {MAX_FUNCTION_LINES} lines ({MAX_KERNEL_LINES} in a kernel): {long}"


def test_signatures_are_short() -> None:
    """No other function has so many parameters, and each of the exceptions still does."""
    long, excused = {}, set()
    for place, node in functions(EVERYWHERE):
        arguments = node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > MAX_PARAMETERS:
            long[place] = count
            excused.add(node.name)
    others = {place: n for place, n in long.items() if place.split()[1] not in LONG_SIGNATURES}
    assert not others, f"over {MAX_PARAMETERS} parameters: {others}"
    assert excused >= LONG_SIGNATURES, "exceptions for nothing"


def test_no_function_is_a_copy() -> None:
    bodies = defaultdict(list)
    for place, node in functions(PACKAGES):
        if own_lines(node) >= MIN_COPIED_LINES:
            bodies["\n".join(ast.dump(statement) for statement in statements(node))].append(place)
    copies = [places for places in bodies.values() if len(places) > 1]
    assert not copies, f"the same body twice: {copies}"


def test_public_things_have_docstrings() -> None:
    missing = []
    for path in files(PACKAGES):
        module = ast.parse(path.read_text(encoding="utf-8"))
        top = [n for n in module.body if isinstance(n, (*Function.__args__, ast.ClassDef))]
        named = [(n.name, n) for n in top if not n.name.startswith("_")]
        for name, node in [("(module)", module), *named]:
            if ast.get_docstring(node) is None:
                missing.append(f"{path.relative_to(ROOT)} {name}")
    assert not missing, f"no docstring: {missing}"

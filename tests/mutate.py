"""Change the code in one place at a time, and check that a test fails.

    python tests/mutate.py --count 20 --seed 7 kvcalc/serving

A mutant is a copy of the tree with one change: a swapped operator (+ and −, * and /, // and *, < and <=, ==
and !=, and and or), a whole number increased or decreased by one, True instead of False, min instead of max,
a negated condition, or a removed statement. Mutants are drawn at random from all places in the given files,
by default all of kvcalc except `measure`. The same seed and code give the same mutants. Annotations,
docstrings, texts and help are never changed.

Each mutant first runs the tests that TESTS lists for its folder, in the listed order. With --whole, all other
tests follow if these pass. --tests selects other tests, for example to check a new assertion:

    python tests/mutate.py --count 20 --seed 7 --only 3,8 --tests test_pool.py kvcalc/serving

The output has the test that failed. If no test failed, the mutant survives, and the output has file, line and
change. A surviving mutant is either in a line that no test checks, or equivalent to the code (the size of a
memo, a faster way to the same figure). The last line has the number of survivors.

The tree is copied to a temporary folder and never changed in place. The tests of a folder first run without a
mutant. Tests that already fail then are printed and left out. A mutant takes 5 to 60 seconds. A mutant whose
tests take longer than --timeout is printed as `slow`. An endless loop or a busy machine can be the reason, so
run such mutants again with a larger --timeout.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED_PATHS = ("kvcalc", "presets", "tests", "docs", "benchmarks", "pyproject.toml", "README.md", "CHANGELOG.md")
# Folder or module → patterns of the tests that are most likely to fail, the fastest first
TESTS = {
    "layers/": """
        test_cost.py test_batch.py test_labels.py test_cache.py test_reach.py test_parameters.py test_recurrent.py
        test_forward*.py test_parallel.py test_attention_roof.py property/test_[ps]*.py test_sums.py test_golden.py test_explain.py
    """,
    "model/": """
        test_labels.py test_parameters.py test_cache.py test_reach.py test_forward*.py test_parallel.py test_quantization.py
        test_hierarchy.py timing/test_nodes.py property/test_[ps]*.py test_files.py test_golden.py test_gguf*.py test_explain.py
        test_embedders.py test_images.py
    """,
    "storage/": "test_dtypes.py test_quantization.py test_gguf*.py test_cache.py test_golden.py",
    "gpu/": "test_roofline.py test_cards.py timing/test_roof.py test_attention_roof.py",
    "library/": """
        test_files.py test_writes.py test_presets.py test_golden.py test_huggingface_*.py test_gguf*.py test_hub.py test_typed.py
        test_commands.py test_completion.py test_cli.py test_deployment_files.py property/test_mutated_configs.py test_presets_checkpoints.py
        test_embedders.py test_images.py test_renamed.py
    """,
    "timing/": """
        timing/test_kernel_model*.py timing/test_[mnprs]*.py timing/test_fitting.py test_rows.py test_validate.py test_roofline.py
        test_attention_roof.py test_lists.py test_sums.py test_explain.py
    """,
    "capacity/": """
        test_fit*.py test_engines_*.py test_allocations.py test_fragmentation.py test_commands.py test_matrix.py test_hierarchy.py
        property/test_fit_properties.py test_deployment_files.py test_one_budget.py test_embedders.py test_explain.py
    """,
    "serving/": "serving/test_limits.py serving/test_[pr]*.py serving/test_si*.py serving test_comparisons.py test_explain.py",
    "diagnosis/": "test_diagnose.py",
    "planning/": """
        planning test_compare.py test_comparisons.py test_reach.py test_fit*.py test_all_gpus.py
        test_attention_roof.py property/test_sizes.py
    """,
    "records/": """
        test_checks.py test_golden.py test_explain.py test_units_of_tables.py test_lists.py test_compare.py test_fit*.py
        planning/test_plan_answers.py serving/test_serve.py report test_typed.py test_references.py test_docs.py
    """,
    "report/explain.py": "test_explain.py planning/test_plan_answers.py test_fit*.py serving/test_serve.py",
    "report/": """
        report test_hierarchy.py test_explain.py test_units_of_tables.py test_cli.py test_notebook*.py test_plots.py
        serving/test_serve.py test_compare.py test_beyond_memory.py test_matrix.py test_diagnose.py test_fit*.py
        test_references.py test_docs.py
    """,
    "cli/measure.py": "measure/test_command.py",
    "question/": "test_cli*.py test_api_arguments.py test_engine_options.py test_help.py test_lists.py test_fit_lists.py",
    "answers/": """
        test_notebook.py test_api_arguments.py test_lists.py test_fit_status.py test_agents.py test_compare.py
        serving/test_serve.py planning/test_plan_answers.py test_diagnose.py test_plots.py test_cli*.py report/test_page.py
    """,
    "cli/": """
        test_cli*.py test_help.py test_completion.py test_remarks.py test_unknown_options.py test_lists.py test_all_gpus.py
        test_fit*.py test_engines_ll*.py test_roofline.py test_compare.py test_validate.py serving test_plots.py test_diagnose.py
        report test_references.py test_docs.py
    """,
    "measure/": "measure",
    "": """
        test_cli*.py test_files.py test_cost.py test_dtypes.py report test_process.py test_packaging.py test_api_arguments.py
        test_checks.py test_docs.py test_layout.py
    """,
}
SWAPS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"),
}  # fmt: skip
REPLACEMENTS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """A mutant: a file, and the new text for the characters from `start` to `end`."""

    path: Path
    start: int
    end: int
    new: str

    def text(self) -> str:
        """Return the text of the file with the change."""
        old = self.path.read_text(encoding="utf-8")
        return old[: self.start] + self.new + old[self.end :]

    def describe(self) -> str:
        """Return `file:line`, and the line before and after the change."""
        old, new = self.path.read_text(encoding="utf-8"), self.text()
        line = old.count("\n", 0, self.start)
        before, after = (text.splitlines()[line].strip() for text in (old, new))
        return f"{self.path.relative_to(ROOT)}:{line + 1}\n    - {before}\n    + {after}"


class MutableSource:
    """All places in one file that can be changed."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8")
        self.lines = [0]
        for line in self.text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """Return the index of the character at a line and a column in bytes, as `ast` counts them."""
        start = self.lines[line - 1]
        return start + len(self.text[start : self.lines[line]].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def mutants(self) -> Iterator[Mutant]:
        for node in walk_nodes(ast.parse(self.text)):
            for start, end, new in self._changes(node):
                yield Mutant(self.path, start, end, new)

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.BinOp):
            yield from self._between(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(left, right, node.op)
        elif isinstance(node, ast.Compare):
            for left, right, op in zip([node.left, *node.comparators], node.comparators, node.ops, strict=False):
                yield from self._between(left, right, op)
        elif isinstance(node, ast.AugAssign) and type(node.op) in (ast.Add, ast.Sub):
            start = self.text.index("=", self.span(node.target)[1]) - 1
            yield start, start + 1, SWAPS[type(node.op)][1]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self.span(node)[0], self.span(node)[0] + 3, ""
        elif isinstance(node, ast.Constant):
            yield from self._constants(node)
        elif isinstance(node, ast.Name) and node.id in REPLACEMENTS and isinstance(node.ctx, ast.Load):
            yield (*self.span(node), REPLACEMENTS[node.id])
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            start, end = self.span(node.test)
            yield start, end, f"(not ({self.text[start:end]}))"
        elif isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Return | ast.Continue | ast.Break):
            yield from self._removed(node)

    def _between(self, left: ast.expr, right: ast.expr, op: ast.AST) -> Iterator[tuple[int, int, str]]:
        if type(op) not in SWAPS:
            return
        old, new = SWAPS[type(op)]
        start = self.text.find(old, self.span(left)[1], self.span(right)[0])
        if start >= 0:
            yield start, start + len(old), new

    def _constants(self, node: ast.Constant) -> Iterator[tuple[int, int, str]]:
        start, end = self.span(node)
        if isinstance(node.value, bool):
            yield start, end, str(not node.value)
        elif isinstance(node.value, int):
            yield start, end, str(node.value + 1)
            if node.value:
                yield start, end, str(node.value - 1)
        elif isinstance(node.value, float):
            yield start, end, repr(node.value * 1.5 + (not node.value))

    def _removed(self, node: ast.stmt) -> Iterator[tuple[int, int, str]]:
        start, end = self.span(node)
        new = "return None" if isinstance(node, ast.Return) and node.value else "pass"
        text = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom)
        if not text and self.text[start:end] != new:
            yield start, end, new


def walk_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except annotations, decorators, types and texts."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value else []
        elif isinstance(node, ast.FunctionDef):
            waiting += [*node.body, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        elif isinstance(node, ast.ClassDef):
            waiting += node.body
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif not isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
            waiting += ast.iter_child_nodes(node)


def sample_mutants(paths: list[Path], count: int, seed: int) -> list[Mutant]:
    """Return `count` random mutants of these files."""
    every = [m for path in paths for m in MutableSource(path).mutants()]
    return random.Random(seed).sample(every, min(count, len(every)))


def run(copy: Path, words: list[str], timeout: float) -> tuple[str, str]:
    """Run tests on the copy.

    Returns:
        "passed", "failed" or "slow" (longer than the timeout), and pytest's output.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *words]
    environment = os.environ | {"PYTHONPATH": str(copy), "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return "slow", ""
    return "failed" if done.returncode else "passed", done.stdout


def failed_tests(output: str) -> list[str]:
    """Return the names of the failed tests in pytest's output."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


@cache
def select_tests(patterns: str, copy: Path, timeout: float) -> tuple[str, ...]:
    """Return pytest arguments: the files that match the patterns, and options that leave out tests that fail without a mutant."""
    found = [p for pattern in patterns.split() for p in sorted((ROOT / "tests").glob(pattern))]
    files = list(dict.fromkeys(p.relative_to(ROOT).as_posix() for p in found))
    outcome, output = run(copy, files, 10 * timeout)
    if outcome != "passed":
        print(f"without a mutant, {outcome}: {', '.join(failed_tests(output))}", flush=True)
    return (*files, *(f"--deselect={name}" for name in failed_tests(output)))


def run_mutant(mutant: Mutant, copy: Path, tests: tuple[str, ...], whole: bool, timeout: float) -> tuple[str, str]:
    """Test one mutant, then restore the copy.

    Returns:
        "SURVIVES", "found" or "slow", and the test that failed.
    """
    target = copy / mutant.path.relative_to(ROOT)
    target.write_text(mutant.text(), encoding="utf-8")
    try:
        outcome, output = run(copy, ["-x", *tests], timeout)
        if whole and outcome == "passed":
            others = [name if name.startswith("--") else f"--deselect={name}" for name in tests]
            outcome, output = run(copy, ["-x", *others], 10 * timeout)
    finally:
        target.write_text(mutant.path.read_text(encoding="utf-8"), encoding="utf-8")
    return {"passed": "SURVIVES", "failed": "found"}.get(outcome, outcome), ", ".join(failed_tests(output))[:160]


def copy_tree(folder: Path) -> Path:
    """Copy the parts of the tree that the tests need, and return the folder of the copy."""
    for name in COPIED_PATHS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or folders below kvcalc", default=["kvcalc"])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="number of mutants to skip, to continue an earlier run")
    parser.add_argument("--only", default="", help="numbers of the mutants to run, as printed: 3,8")
    parser.add_argument("--tests", default="", help="patterns below tests/, instead of the tests of the folder")
    parser.add_argument("--whole", action="store_true", help="run the whole suite if the tests of the folder pass")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for the tests of a folder")
    options = parser.parse_args()
    given = [(ROOT / p).resolve() for p in options.paths]
    files = sorted(f for p in given for f in ([p] if p.is_file() else p.rglob("*.py")))
    if options.paths == ["kvcalc"]:
        files = [f for f in files if "measure" not in f.parts]
    chosen = sample_mutants(files, options.count, options.seed)
    some = [int(n) for n in options.only.split(",") if n] or range(options.skip + 1, len(chosen) + 1)
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_tree(Path(folder))
        for number in some:
            mutant, begun = chosen[number - 1], time.monotonic()
            inside = mutant.path.relative_to(ROOT / "kvcalc").as_posix()
            patterns = options.tests or TESTS[next(room for room in TESTS if inside.startswith(room))]
            outcome, by = run_mutant(mutant, copy, select_tests(patterns, copy, options.timeout), options.whole, options.timeout)
            alive += outcome == "SURVIVES"
            place = f"{mutant.describe().partition(chr(10))[0]}  {by}" if outcome == "found" else mutant.describe()
            print(f"{number:4} {outcome:8} {time.monotonic() - begun:5.1f} s  {place}", flush=True)
    print(f"{alive} of {len(some)} mutants survive")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())

"""A family's tuner script as this AITER has it: its options, and the columns of its list of shapes.

The script is read, not run: scripts of all dates stop with status 2 at a flag that they do not know, so launch.py only
sets those that `TunerScript.has`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from worker.aiter_tree.locate import TreeFiles
from worker.families import Family
from worker.text import clean

_FLAG_ACTIONS = frozenset(("store_true", "store_false", "store_const", "append_const", "count", "help", "version"))


@dataclass(frozen=True, slots=True)
class TunerScript:
    """One family's script."""

    path: Path
    flags: Mapping[str, str]
    """Its long options: `flag` if one takes no value, else `value`."""
    columns: tuple[str, ...]
    """Columns of its untuned CSV, in AITER's words."""

    def has(self, flag: str) -> bool:
        return flag in self.flags


def read_script(files: TreeFiles, family: Family, path: Path) -> TunerScript:
    """The family's script, with the columns of the list of shapes that AITER ships for it."""
    header = files.text(files.tree.package / "configs" / family.untuned_csv).split("\n", 1)[0]
    columns = tuple(filter(None, (column.strip() for column in header.split(","))))
    return TunerScript(path, _flags(files, path, set()), columns or family.to_aiter(family.key_names))


def _flags(files: TreeFiles, path: Path, seen: set[Path]) -> dict[str, str]:
    """The long options of a script and of the tuners that it imports, read flatly: whatever is added is an option, but
    for those of an imported tuner that the script takes back (`if "--splitK" in action.option_strings`)."""
    seen.add(path)
    try:
        nodes = list(ast.walk(ast.parse(files.text(path))))
    except (SyntaxError, ValueError, RecursionError) as e:
        files.problem(f"{files.name(path)} is no Python that can be parsed here: {clean(str(e), 120)}")
        return {}
    flags: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            imported = _imported_tuner(files, path, node, seen)
            if imported is not None:
                flags |= _flags(files, imported, seen)
    for node in nodes:
        if isinstance(node, ast.Compare) and ast.unparse(node).endswith(".option_strings"):
            flags.pop(str(getattr(node.left, "value", "")), None)
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flags |= _options_added(node)
    return flags


def _imported_tuner(files: TreeFiles, script: Path, node: ast.ImportFrom, seen: set[Path]) -> Path | None:
    """The file of a tuner that a script imports, if it was not read yet."""
    if not node.module or not any("Tuner" in alias.name for alias in node.names):
        return None
    parts = node.module.split(".")
    if parts[0] == "aiter":
        folders = [files.tree.package.parent]
    else:
        folders = [script.parent, *sorted((files.tree.meta / "hsa").glob("gfx*"))]
    for folder in folders:
        path = folder.joinpath(*parts).with_suffix(".py")
        if path.is_file() and path not in seen:
            return path
    return None


def _options_added(call: ast.Call) -> dict[str, str]:
    """The long options that a call of `add_argument` adds, each `flag` or `value`."""
    action = {keyword.arg: keyword.value for keyword in call.keywords}.get("action")
    has_negation = getattr(action, "attr", "") == "BooleanOptionalAction"
    is_flag = has_negation or getattr(action, "value", None) in _FLAG_ACTIONS
    texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    names = [text for text in texts if text.startswith("--")]
    if has_negation:
        names += [f"--no-{name[2:]}" for name in names]
    return dict.fromkeys(names, "flag" if is_flag else "value")

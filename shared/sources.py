"""The source of live definitions: what an open notebook would need to define one of its functions again elsewhere.

On Colab the notebook is not on disk, and anywhere the reader may have edited a cell since it was saved. What runs
is what counts, so this starts from the live object, finds its text through `linecache` (where IPython keeps every cell
that ran, and `shared.cells` those it loads) and follows each name it uses to what that name means now.
"""

import ast
import functools
import inspect
import linecache
import pickle
import symtable
import sys
import sysconfig
import types
from pathlib import Path


def sources(*objects) -> list[str]:
    """The texts that define `objects` (functions, classes, Triton kernels), dependencies first.

    Each text is one top-level statement of a notebook cell or file, on the lines where it stood. Definitions in cells,
    and in the file of one of `objects`, are taken along; modules, constants and packages' functions are imported or
    pickled. What nothing needs (a cell's prints, plots, checks) stays behind. ValueError when no source is found.
    """
    texts, done, roots = [], set(), {}
    files = {origin(value)[1] for value in objects if _is_live(origin(value)[1])}

    def define(name: str, file: str, scope: dict) -> bool:
        """Append the statements of `file` that bind `name`, after what they use; False when there is none."""
        found = [(used, text) for bound, used, text in statements_of(_text(file)) if name in bound]
        for used, text in found:
            for other in sorted(used & scope.keys()):
                follow(other, file, scope)
            if text not in texts:
                texts.append(text)
        return bool(found)

    def follow(name: str, home: str, scope: dict) -> None:
        """Append what gives `name`, used in the file `home`, the value that it has in `scope`."""
        if (name, id(scope)) in done:
            return
        done.add((name, id(scope)))
        value = scope[name]
        inner, file, inner_scope = origin(value)
        if file in files or _is_cell(file):
            first = inner.__qualname__.partition(".")[0]
            if define(name, file, inner_scope):
                return
            if inner_scope.get(first) is value and define(first, file, inner_scope):
                return texts.append(f"{name} = {first}")
        line = _reference(name, value, inner, scope.get("__name__", "__main__"))
        if line:
            return texts.append(line)
        # what cannot travel, such as a dict of kernels, is bound in this cell or, the newest first, in another
        any(define(name, cell, scope) for cell in (home, *_siblings(home)))

    for value in objects:
        inner, file, scope = origin(value)
        name = path(value).partition(".")[0]
        if roots.setdefault(name, file) != file:
            raise ValueError(f"two definitions of {name}: give one of them another name")
        line = None if _is_live(file) else _reference(name, value, inner, "__main__")
        if line:
            texts.append(line)
        elif not _is_live(file) or "<" in path(value) or not define(name, file, scope):  # as in f.<locals>.g
            raise ValueError(f"{value!r} has no source; define it at the top level of a notebook cell or of a file")
    return texts


def path(value) -> str:
    """Where a module made of `sources(value)` has it: its qualified name there, such as "Softmax.apply"."""
    inner, file, _ = origin(value)
    if not _is_live(file):
        return getattr(inner, "__name__", "value")
    return inner.__qualname__ + (f".{value.__name__}" if inspect.ismethod(value) else "")


def origin(value) -> tuple:
    """(the function or class inside Triton's, functools' and PyTorch's wrappers, its file, its globals).

    File and globals are None where there is no text, as for a function written in C.
    """
    for _ in range(8):  # wrappers within wrappers
        if inspect.ismethod(value) and inspect.isclass(value.__self__):
            value = value.__self__  # the `apply` of an autograd function
        if isinstance(value, (type, types.ModuleType)):
            break
        inside = getattr(value, "__dict__", {})
        wrapped = next((inside[key] for key in ("__wrapped__", "fn", "_init_fn") if key in inside), None)
        if wrapped is None:
            break
        value = wrapped
    parts = vars(value).values() if inspect.isclass(value) else [value]
    for part in (getattr(part, "__func__", part) for part in parts):
        function = inspect.unwrap(part) if callable(part) else part
        if inspect.isfunction(function) and _text(function.__code__.co_filename):
            return value, function.__code__.co_filename, function.__globals__
    return value, None, None


def _text(file: str) -> str:
    return "".join(linecache.getlines(file))


def _is_live(file: str | None) -> bool:
    """Whether a file holds definitions of the course or its reader, rather than of a package or of this helper."""
    if file is None or _is_cell(file):
        return file is not None
    parts = Path(file).resolve().parts
    library = Path(sysconfig.get_path("stdlib")).resolve().parts
    installed = {"site-packages", "dist-packages"} & set(parts) or parts[: len(library)] == library
    return not installed and Path(file).resolve().parent != Path(__file__).resolve().parent


def _is_cell(file: str | None) -> bool:
    """Whether a file name stands for a cell: `linecache` keeps such text without a time of modification.

    IPython 7, which Colab has, gives it one; but it has a list of its own.
    """
    entry = linecache.cache.get(file, ())
    return file in getattr(linecache, "_ipython_cache", ()) or (len(entry) > 1 and entry[1] is None)


def _siblings(file: str) -> list[str]:
    """The other cells of the same notebook, or of the same module that `shared.cells` made; the newest first."""
    family = lambda name: name.split()[0] if name.startswith("<") else str(Path(name).parent)
    return [name for name in reversed(list(linecache.cache)) if _is_cell(name) and family(name) == family(file)]


@functools.cache
def statements_of(text: str) -> list[tuple[set, set, str]]:
    """(names bound, global names used, text behind as many empty lines as it had lines before) of each statement."""
    lines, statements = text.splitlines(keepends=True), []
    for node in ast.parse(text).body:
        start = min([node.lineno] + [line.lineno for line in getattr(node, "decorator_list", [])]) - 1
        table = symtable.symtable(ast.unparse(node), "<statement>", "exec")
        bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local()}
        statements.append((bound, _globals(table), "\n" * start + "".join(lines[start : node.end_lineno])))
    return statements


def _globals(table: symtable.SymbolTable) -> set[str]:
    """The global names that are read in a scope or in the scopes within it."""
    at_top = table.get_type() == "module"
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (at_top or s.is_global())}
    return names.union(*(_globals(child) for child in table.get_children()))


def _reference(name: str, value, inner, here: str) -> str | None:
    """A line that gives `name` its value in another process; None if that takes the module `here`, unknown there."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    try:
        data = pickle.dumps(value)
    except Exception:  # of many kinds; a package's Triton kernel, for one, is not pickled but can be imported
        module, path = getattr(inner, "__module__", None), getattr(inner, "__qualname__", "")
        found = getattr(sys.modules.get(module), path, None) is value
        return f"from {module} import {path} as {name}" if found and module != here else None
    return None if here.encode() in data else f"{name} = __import__('pickle').loads({data!r})"

"""Imports run one way, as the architecture has it; heavy packages stay in the rooms that need them.

The modules are read, not run: every `import` in them counts, also one inside a function, but for those that only a
type checker sees.
"""

import ast
from functools import cache
from pathlib import Path

import freetoken

PACKAGE = Path(freetoken.__file__).parent

#: Room -> rooms it may import. A room's own modules are always allowed.
BASE = {"units", "errors", "paths", "local", "outfile", "__init__"}
FACTS = BASE | {"recipe", "hardware", "checkpoint", "residency"}
PLANNER = FACTS | {"planner"}
ADAPTERS = PLANNER | {"adapters"}
SERVICES = ADAPTERS | {"bench", "store", "supervisor"}
DEPLOY = SERVICES | {"deploy"}
TOP = DEPLOY | {"tuner", "share", "report", "doctor"}
ALLOWED = {
    "units": set(), "errors": set(), "paths": set(), "__init__": set(), "__main__": {"cli"}, "data": set(),
    "outfile": {"errors"},
    "local": {"paths", "errors", "__init__"},
    "recipe": BASE, "hardware": BASE, "checkpoint": BASE, "residency": BASE,
    "planner": FACTS,
    "adapters": PLANNER,
    "bench": ADAPTERS, "store": ADAPTERS, "supervisor": ADAPTERS,
    "deploy": SERVICES,
    "tuner": DEPLOY, "share": DEPLOY, "report": DEPLOY, "doctor": DEPLOY,
    "engine": BASE | {"residency", "checkpoint"},
    "server": BASE | {"residency", "checkpoint", "engine"},
    "cli": TOP,
    "api": TOP | {"engine"},
}  # fmt: skip
#: Single modules that may reach further, each with its reason.
EXCEPTIONS = {
    ("cli/serve.py", "engine"): "`ft serve` is the engine's own process",
    ("cli/serve.py", "server"): "`ft serve` is the engine's own process",
}
#: Third-party package -> where it may be imported at all.
HEAVY = {
    "torch": ("engine/", "hardware/bandwidth.py"),
    "transformers": ("engine/", "server/"),
    "optuna": ("tuner/",),
    "sqlalchemy": (),
    "fastapi": ("server/",),
    "uvicorn": ("server/",),
    "sqlite_utils": ("store/",),
    "sqlite3": ("store/",),
    "pickle": (),
    "plotly": ("report/",),
    "psycopg": (),
}


@cache
def list_modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if "data" not in path.relative_to(PACKAGE).parts[:1])


def name_of(path):
    return str(path.relative_to(PACKAGE))


@cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def list_imports(path):
    """Absolute module names imported anywhere in the file, with their lines; those for type checkers left out."""
    return tuple(find_imports(path, parse(path)))


def find_imports(path, tree):
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            # `from freetoken import paths` names a module of ours, `from freetoken.recipe import model` too.
            yield node.module, node.lineno
            if node.module == "freetoken":
                yield from ((f"freetoken.{alias.name}", node.lineno) for alias in node.names)


def room_of(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def target_room(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_imports_run_one_way():
    wrong = []
    for path in list_modules():
        room, name = room_of(path), name_of(path)
        for module, line in list_imports(path):
            target = target_room(module)
            is_ours = (PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").is_file()
            if module.split(".")[0] != "freetoken" or target == room or not is_ours:
                continue
            if target not in ALLOWED[room] and (name, target) not in EXCEPTIONS:
                wrong.append(f"{name}:{line}: `{room}` imports `{module}`")
    assert wrong == []


def test_heavy_packages_stay_where_they_are_needed():
    wrong = [
        f"{name_of(path)}:{line}: imports `{module}`"
        for path in list_modules()
        for module, line in list_imports(path)
        if (places := HEAVY.get(module.split(".")[0])) is not None and not name_of(path).startswith(places)
    ]
    assert wrong == []


def test_the_exceptions_are_all_needed():
    used = {(name_of(path), target_room(module)) for path in list_modules() for module, _ in list_imports(path)
            if module.startswith("freetoken.")}  # fmt: skip
    assert {one for one in EXCEPTIONS if one not in used} == set()


def test_every_room_has_a_line_in_the_table():
    rooms = {room_of(path) for path in list_modules()}
    assert rooms <= set(ALLOWED)


def test_every_module_says_what_it_is_for():
    silent = [name_of(path) for path in list_modules() if not ast.get_docstring(parse(path))]
    assert silent == []


def test_nothing_but_an_adapter_asks_which_engine_it_is():
    """A comparison with an engine's name anywhere else would be knowledge of that engine."""
    engines = {"native", "freetoken", "llamacpp", "vllm", "sglang", "ollama", "ktransformers"}
    found = []
    for path in list_modules():
        if room_of(path) == "adapters":
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                texts = {side.value for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)}
                if texts & engines and any("engine" in ast.dump(side) or "name" in ast.dump(side) for side in sides):
                    found.append(f"{name_of(path)}:{node.lineno}")
    assert found == []

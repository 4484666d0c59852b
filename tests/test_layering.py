"""The house stands: every import points down, each library has its one door, files stay small and say what they are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "trace_jax"
# From the ground up; layers in one group stand side by side and do not know each other.
ORDER = (
    ("types",),
    ("tree", "budget", "serving", "sandbox", "retrieval", "data"),
    ("objectives",),
    ("models",),
    ("tasks",),
    ("engines",),
    ("rollout",),
    ("train",),
    ("eval",),
    ("report",),
    ("config_tasks", "config_allocation"),
    ("config",),
    ("config_checks", "flag_problems", "setup_run", "setup_data_tasks", "interruption"),
    ("config_arguments",),
    ("learned",),
    ("loop",),
    ("saving", "setup_predictor"),
    ("assemble",),
    ("run", "evaluation", "predictor_quality"),
    ("main", "evaluate", "export", "launch_sglang", "predictor_report"),
)
LEVEL = {name: level for level, group in enumerate(ORDER) for name in group}
NO_JAX = ("types", "tree", "budget", "serving", "sandbox", "retrieval", "data", "tasks", "rollout")  # nor what stands on jax
JAX_FAMILY = ("jax", "jaxlib", "flax", "optax", "orbax", "chex")
MAX_LINES = 400


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PARSED = {module_name(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST) -> set[str]:
    """Every module that is imported anywhere: in functions and under TYPE_CHECKING too, by name or as a call."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            # `from trace_jax.tree import grow` names a module, `from trace_jax.types import Turn` a class of one.
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in PARSED else node.module for name in full}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else {"?"}
    return found


IMPORTS = {module: imports(tree) for module, tree in PARSED.items()}


def importers(library: str) -> set[str]:
    inside = lambda name: name == library or name.startswith(library + ".")
    return {module for module, names in IMPORTS.items() if any(map(inside, names))}


def test_the_walker_sees_every_kind_of_import():
    source = """
import a.b
from trace_jax.tree import grow
from trace_jax.types import Turn
def f():
    from c import d
if TYPE_CHECKING:
    import e
importlib.import_module("g")
"""
    assert imports(ast.parse(source)) == {"a.b", "trace_jax.tree.grow", "trace_jax.types", "c", "e", "g"}


def test_every_module_has_a_layer():
    assert {layer(module) for module in PARSED} - {""} == set(LEVEL)


@pytest.mark.parametrize("module", [module for module in PARSED if module != "trace_jax"])
def test_imports_point_down(module):
    own = layer(module)
    for name in sorted(IMPORTS[module]):
        if name.split(".")[0] != "trace_jax":
            continue
        assert name in PARSED, f"{module} imports {name}, which is no module"
        other = layer(name)
        assert other == own or LEVEL[other] < LEVEL[own], f"{module} imports {name}, which does not stand below it"


def test_no_module_imports_itself_in_a_circle():
    """Peels off modules whose imports are all peeled off; a circle would remain."""
    left = {module: {name for name in names if name in PARSED} for module, names in IMPORTS.items()}
    while ready := [module for module, names in left.items() if not names & set(left)]:
        left = {module: names for module, names in left.items() if module not in ready}
    assert not left


def test_what_runs_on_the_host_knows_no_jax():
    for library in JAX_FAMILY:
        assert not {module for module in importers(library) if layer(module) in NO_JAX}, library


def test_each_library_has_its_door():
    assert {layer(module) for module in importers("flax")} == {"models"}
    assert importers("orbax") == {"trace_jax.train.checkpoint"}
    assert {layer(module) for module in importers("ml_collections")} == {"config", "config_arguments", "main"}
    assert importers("transformers") == {"trace_jax.tasks.tokenizer", "trace_jax.tasks.chat.render"}
    assert importers("jinja2") == {"trace_jax.tasks.chat.render"}
    assert importers("tensorboardX") == importers("wandb") == {"trace_jax.train.metrics"}
    assert {layer(module) for module in importers("absl")} == {
        "main", "flag_problems", "config_arguments"
    }
    clients = {"trace_jax.retrieval.client", "trace_jax.sandbox.service"}  # they speak to a service of their own
    servers = {"trace_jax.retrieval.server", "trace_jax.sandbox.server"}
    assert importers("aiohttp") == {"trace_jax.engines.sglang_server", "trace_jax.engines.sglang_pool"} | servers
    assert importers("tenacity") == {"trace_jax.engines.sglang"} | clients
    assert importers("httpx") == clients
    assert importers("bm25s") <= {"trace_jax.retrieval.bm25"}
    assert importers("tensorflow_datasets") == {"trace_jax.data.builders"}
    assert importers("grain") == {"trace_jax.data.order"} and importers("pyarrow") == {"trace_jax.data.readers"}
    assert {layer(module) for module in importers("math_verify") | importers("pebble")} == {"tasks"}
    assert importers("bfcl_eval") <= {"trace_jax.tasks.bfcl.services", "trace_jax.tasks.bfcl.scoring"}
    assert importers("gguf") == {"trace_jax.models.gguf_import"}
    assert importers("safetensors") == {"trace_jax.models.weights"}


def test_types_stand_on_numpy_alone():
    standard = {"__future__", "dataclasses", "enum", "typing"}
    assert IMPORTS["trace_jax.types"] - standard == {"numpy"}


def test_packages_hold_no_code():
    for path in ROOT.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1 and isinstance(body[0], ast.Expr), f"{path} holds more than its docstring"


def public_definitions(tree: ast.Module):
    """(name, node) of public classes and functions, and of public methods of public classes."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and not inner.name.startswith("_"):
                        yield f"{node.name}.{inner.name}", inner


@pytest.mark.parametrize("module", PARSED)
def test_everything_public_has_a_docstring(module):
    assert ast.get_docstring(PARSED[module]), module
    missing = [name for name, node in public_definitions(PARSED[module]) if not ast.get_docstring(node)]
    assert not missing, f"{module}: {', '.join(missing)}"


def test_files_stay_small():
    long = {path.name: n for path in ROOT.rglob("*.py") if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long


def test_lines_fit_120_columns():
    lines = ((path, i, line) for path in ROOT.rglob("*.py") for i, line in enumerate(path.read_text().splitlines(), 1))
    assert not [f"{path.name}:{i}" for path, i, line in lines if len(line) > 120]

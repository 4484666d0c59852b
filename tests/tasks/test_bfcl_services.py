"""The simulated services: found, called, copied, and bounded."""

from __future__ import annotations

import copy
import datetime
import decimal
import gc
import math
import subprocess
import sys
import threading
import time
import weakref

import pytest

from tests.tasks import bfcl_records
from trace_jax.tasks.bfcl import services
from trace_jax.tasks.bfcl.literal_calls import CallError

pytest.importorskip("bfcl_eval", reason="pip install --no-deps bfcl-eval==2026.3.23, and mpmath and filelock")

CONFIG = bfcl_records.handmade()["initial_config"]


def files(**more):
    return services.load(["GorillaFileSystem", "MathAPI"], CONFIG, **{"long_context": False, **more})


def call(current, method, /, **arguments):
    class_name = "MathAPI" if method in ("power", "logarithm", "square_root", "round_number") else "GorillaFileSystem"
    return services.run(current, class_name, method, arguments)


def test_results_are_texts_as_the_official_runner_writes_them():
    current = files()
    assert call(current, "ls")[1] == '{"current_directory_content": ["a.txt", "deep"]}'  # JSON of a dict
    assert call(current, "mkdir", dir_name="new")[1] == "None"  # text of anything else
    assert call(current, "square_root", number=4, precision=3)[1] == "{'result': Decimal('2')}"  # no JSON
    assert call(current, "cd", folder=3)[1] == "Error during execution: 'int' object has no attribute 'rstrip'"
    assert call(current, "cd")[1].startswith("Error during execution: GorillaFileSystem.cd() missing 1 required")


def reachable(value, seen):
    """ids of everything that can be changed inside of a value."""
    if id(value) in seen or isinstance(value, (str, int, float, tuple, datetime.datetime, type(None))):
        return seen
    seen.add(id(value))
    inner = value if isinstance(value, (dict, list, set)) else getattr(value, "__dict__", {})
    for item in inner.values() if isinstance(inner, dict) else inner:
        reachable(item, seen)
    return seen


def test_a_changed_copy_shares_nothing_with_what_it_came_from():
    before = files()
    kept = copy.deepcopy(before)
    after, _ = call(before, "mkdir", dir_name="new")
    assert before["GorillaFileSystem"] == kept["GorillaFileSystem"]
    assert "new" not in before["GorillaFileSystem"].root.contents
    assert "new" in after["GorillaFileSystem"].root.contents
    old, new = (reachable(value["GorillaFileSystem"], set()) for value in (before, after))
    assert len(old) > 5 and not old & new


def test_a_scenario_shares_nothing_with_its_config_or_with_another():
    cards = {"TravelAPI": {"credit_card_list": {"1": {"balance": 5}}}}
    one, two = (services.load(["TravelAPI"], cards, long_context=True)["TravelAPI"] for _ in range(2))
    assert len(one.credit_card_list) > 1  # the long scenario's own cards
    one.credit_card_list.clear()
    assert two.credit_card_list and cards["TravelAPI"]["credit_card_list"]
    assert not reachable(two, set()) & reachable(one, set())


def test_instances_go_when_nobody_holds_them():
    current = files()
    refs = []
    for number in range(5):
        current, _ = call(current, "mkdir", dir_name=f"d{number}")
        refs.append(weakref.ref(current["GorillaFileSystem"]))
    del current
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5


def test_documented_methods_only():
    classes = ["GorillaFileSystem", "MathAPI"]
    found = services.methods(classes, ["cd", "mean", "_load_scenario", "__init__", "root", "post_tweet"])
    assert found == {"cd": "GorillaFileSystem", "mean": "MathAPI"}
    with pytest.raises(ValueError, match="'WebSearchAPI' is not one of"):
        services.load(["WebSearchAPI"], {}, long_context=False)


def test_every_documented_function_has_a_method():
    """The documents name 128 functions of eight classes."""
    names = {name: [d["name"] for d in bfcl_records.documents(name)] for name in services.CLASSES}
    for class_name, documented in names.items():
        assert services.methods([class_name], documented) == dict.fromkeys(documented, class_name)
    assert sum(map(len, names.values())) == 128


def test_positional_arguments_get_their_names():
    assert services.named_arguments("GorillaFileSystem", "diff", ["x"], {"file_name2": "y"}) == {
        "file_name1": "x",
        "file_name2": "y",
    }
    with pytest.raises(CallError, match="diff: too many positional"):
        services.named_arguments("GorillaFileSystem", "diff", ["x", "y", "z"], {})


def test_what_a_method_sets_for_the_process_is_taken_back():
    mpmath = pytest.importorskip("mpmath")
    before = mpmath.mp.dps, decimal.getcontext().prec
    current = files()
    assert call(current, "logarithm", value=8, base=2, precision=40)[1] == "{'result': mpf('3.0')}"
    call(current, "square_root", number=2, precision=77)
    assert (mpmath.mp.dps, decimal.getcontext().prec) == before


def test_threads_do_not_see_each_others_precision():
    current, found = files(), {}

    def work(precision):
        found[precision] = {call(current, "logarithm", value=20, base=10, precision=precision)[1] for _ in range(40)}

    threads = [threading.Thread(target=work, args=(precision,)) for precision in (2, 5, 9, 30)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for precision, results in found.items():
        (result,) = results
        digits = result.split("'")[3]
        assert abs(float(digits) - math.log10(20)) < 10.0 ** (1 - precision) and len(digits) <= precision + 6


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("power", {"base": 3, "exponent": 10**7}),
        ("power", {"base": -(10**300), "exponent": 10**300}),
        ("logarithm", {"value": 2, "base": 3, "precision": 1_001}),
        ("logarithm", {"value": "1e99999999999", "base": 3, "precision": 5}),
        ("square_root", {"number": 2, "precision": 1e18}),
        ("round_number", {"number": 5, "decimal_places": -(10**9)}),
    ],
)
def test_endless_arithmetic_is_refused(method, arguments):
    start = time.perf_counter()
    with pytest.raises(CallError, match=method):
        call(files(), method, **arguments)
    assert time.perf_counter() - start < 1


def test_large_arithmetic_is_not():
    current = files()
    assert call(current, "power", base=2, exponent=1000)[1] == f'{{"result": {2**1000}}}'
    assert call(current, "power", base=1, exponent=10**300)[1] == '{"result": 1}'
    assert call(current, "power", base=2, exponent=-(10**300))[1] == '{"result": 0.0}'


def test_a_file_system_that_copies_itself_into_itself_is_refused():
    with pytest.raises(CallError, match="file system holds at most"):
        call(files(), "cp", source="deep", destination="deep")


def test_a_file_system_that_doubles_is_refused_in_time():
    """Each round adds a copy of a folder to it: walked as a tree, the folder has twice as many files after it."""
    current, start, rounds = files(), time.perf_counter(), 0
    with pytest.raises(CallError, match="file system holds at most"):
        for rounds in range(40):
            current, _ = call(current, "cp", source="deep", destination=f"copy{rounds}")
            current, _ = call(current, "mv", source=f"copy{rounds}", destination="deep")
    assert 8 <= rounds <= 15 and time.perf_counter() - start < 5  # 2^14 = 16,384 files, and some folders
    assert call(current, "find", path=".")[1].startswith('{"matches"')


def test_a_file_system_as_deep_as_a_thousand_folders_is_refused():
    current, depth = files(), 0
    with pytest.raises(CallError, match="64 folders deep"):
        for depth in range(1_000):
            current, _ = call(current, "mkdir", dir_name="d")
            current, _ = call(current, "cd", folder="d")
    assert depth == 64
    copy.deepcopy(current)


@pytest.mark.parametrize("package", ["bfcl_eval", "mpmath"])
def test_a_missing_package_is_one_line_with_the_remedy(monkeypatch, package):
    for name in [name for name in sys.modules if name.split(".")[0] == "bfcl_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"package {package} is not installed; run `pip install --no-") as error:
        services.require()
    assert "\n" not in str(error.value)


def test_the_package_is_imported_lightly_and_leaves_nothing():
    """In a process of its own: no jax, no settings from files, no folders beside the package, no vendor's client."""
    code = """
import pathlib, sys
import bfcl_eval
folder = pathlib.Path(bfcl_eval.__file__).parents[1]
before = set(folder.iterdir())
from trace_jax.tasks.bfcl.family import Bfcl
Bfcl()
from trace_jax.tasks.bfcl import services, scoring
services.load(list(services.CLASSES), {}, long_context=True)
assert set(folder.iterdir()) == before
loaded = {name.split(".")[0] for name in sys.modules} | set(sys.modules)
print(sorted(loaded & {"jax", "dotenv", "openai", "anthropic", "requests", "torch", "transformers",
                       "bfcl_eval.constants.eval_config", "bfcl_eval.model_handler"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

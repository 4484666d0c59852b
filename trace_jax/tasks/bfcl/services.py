"""The simulated services that calls go to: objects that are never changed, only replaced by changed copies.

They are classes of the package bfcl-eval (an extra), of which only those of the multi-turn categories are ever loaded.
A call reaches a method if the class is in `CLASSES` and the method's name is in the documentation that a record brings;
it is looked up in the class's own dictionary, never by `getattr`.
"""

from __future__ import annotations

import copy
import decimal
import importlib
import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.tasks.bfcl.literal_calls import CallError

CLASSES = {  # name -> module
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
FOLDER = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
INSTALL = "run `pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath filelock`"
MAX_DIGITS = 1_000  # of precision and of rounding
MAX_POWER_BITS = 16_384  # Python prints no integer of more than 4,300 digits, which are 14,285 bits
MAX_FILES = 20_000  # files and folders that a file system may hold; the data set's begin with at most 124
MAX_FOLDERS_DEEP = 64  # copying and comparing go down recursively
GROWING = ("mkdir", "touch", "mv", "cp")  # methods of the file system that can make it larger or deeper
_RUNNING = threading.Lock()  # some methods write to their modules' globals before they read them

Services = Mapping[str, Any]  # class name -> instance


def require() -> None:
    """Raises ValueError with the remedy if the package, or one that it needs, is not installed."""
    for module in (f"{FOLDER}.math_api", "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            package = (error.name or "bfcl_eval").split(".")[0]
            raise ValueError(f"bfcl: package {package} is not installed; {INSTALL}") from None


def load(classes: Sequence[str], config: Mapping[str, Any], *, long_context: bool) -> Services:
    """New instances in their first state, in the order of `classes`. Raises ValueError for an unknown class."""
    services = {}
    for name in classes:
        instance = _class(name)()
        if name != "MathAPI":  # which has no state
            instance._load_scenario(copy.deepcopy(config.get(name, {})), long_context=long_context)
        services[name] = copy.deepcopy(instance)  # a long scenario holds parts of its module's globals
    return services


def methods(classes: Sequence[str], documented: Sequence[str]) -> dict[str, str]:
    """Name of each documented method -> its class; of two classes with one name, the later one has it (official)."""
    known = set(documented)
    found = {}
    for name in classes:
        members = vars(_class(name)).items()
        found |= {m: name for m, v in members if m in known and not m.startswith("_") and inspect.isfunction(v)}
    return found


def named_arguments(
    class_name: str, method: str, positional: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments of a call by name. Raises CallError if the method does not take them."""
    try:
        bound = inspect.signature(vars(_class(class_name))[method]).bind(None, *positional, **named).arguments
    except TypeError as error:
        raise CallError(f"{method}: {error}") from None
    return dict(list(bound.items())[1:])


def run(services: Services, class_name: str, method: str, arguments: Mapping[str, Any]) -> tuple[Services, str]:
    """Calls a method on a copy of its instance: (services with the changed copy, the result as text).

    The text is the official runner's: JSON of a dict where that exists, else Python's own text; a method that raises
    gives "Error during execution: ..." and keeps what it had changed. Raises CallError, with nothing changed, for a
    call that would take unbounded time or memory. `arguments` must not be used afterwards.
    """
    _check_numbers(method, arguments)
    instance = copy.deepcopy(services[class_name])
    run_method = _run_exact if class_name == "MathAPI" else _run
    with _RUNNING:
        text = run_method(vars(type(instance))[method], instance, arguments)
    if method in GROWING:
        _check_files(instance)
    return {**services, class_name: instance}, text


def _class(name: str) -> type:
    if name not in CLASSES:
        raise ValueError(f"bfcl: class {name!r} is not one of {', '.join(CLASSES)}")
    return getattr(importlib.import_module(f"{FOLDER}.{CLASSES[name]}"), name)


def _run(function: Any, instance: Any, arguments: Mapping[str, Any]) -> str:
    try:
        result = function(instance, **arguments)
        if isinstance(result, dict):
            try:
                return json.dumps(result)
            except (TypeError, ValueError):
                return str(result)
        return str(result)
    except Exception as error:  # whatever a method does with odd values is the policy's to see
        return f"Error during execution: {error}"


def _run_exact(function: Any, instance: Any, arguments: Mapping[str, Any]) -> str:
    """As `_run`; the precision that the method sets for the whole process is taken back."""
    import mpmath

    with decimal.localcontext(), mpmath.workdps(mpmath.mp.dps):
        return _run(function, instance, arguments)


def _check_numbers(method: str, arguments: Mapping[str, Any]) -> None:
    """Raises CallError where a number would make a method of MathAPI run for ever."""
    for name in ("precision", "decimal_places"):
        value = arguments.get(name, 0)
        if isinstance(value, (int, float)) and abs(value) > MAX_DIGITS or isinstance(value, str) and len(value) > 3:
            raise CallError(f"{method}: {name} is {str(value)[:20]}, at most {MAX_DIGITS} digits are computed")
    base, exponent = arguments.get("base"), arguments.get("exponent")
    if method == "power" and isinstance(base, int) and isinstance(exponent, int):
        if exponent > 0 and exponent * base.bit_length() > MAX_POWER_BITS and abs(base) > 1:
            raise CallError("power: the result has more than 4300 digits")
    if method == "logarithm":  # whose library reads numbers from strings, "1e999999999" too
        for name in ("value", "base"):
            if isinstance(text := arguments.get(name), str) and (len(text) > 32 or "e" in text.lower()):
                raise CallError(f"logarithm: {name} is a string, must be a number")


def _check_files(instance: Any) -> None:
    """Raises CallError for a file system that has grown too large or too deep, into itself or by counting shared parts.

    Copying a folder into itself makes a circle, and copies of copies share their parts: walked as a tree, such a file
    system is endless or doubles with every call.
    """
    left = MAX_FILES
    todo = [(instance.root, 0), (instance._current_dir, 0)]
    while todo:
        folder, depth = todo.pop()
        contents = getattr(folder, "contents", {})
        left -= len(contents)
        if left < 0 or depth > MAX_FOLDERS_DEEP:
            raise CallError(f"the file system holds at most {MAX_FILES} files, {MAX_FOLDERS_DEEP} folders deep")
        todo += [(item, depth + 1) for item in contents.values()]

"""Plant a fault in the running product: its functions get the code of a changed source."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType

import pytest

from tests.mutants import REPO, Mutant


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The fault is there within, in whatever holds the functions of the module."""
    file = mutant.file()
    module = importlib.import_module(".".join(file.with_suffix("").parts))
    text, _ = mutant.plant()
    codes = dict(_codes(compile(text, str(REPO / file), "exec", dont_inherit=True)))
    num_changed = 0
    with pytest.MonkeyPatch.context() as patch:
        for function in _functions(module):
            code = codes[function.__code__.co_qualname]
            if _essence(code) != _essence(function.__code__):
                patch.setattr(function, "__code__", code)
                num_changed += 1
        assert num_changed == 1, f"the fault changes {num_changed} functions"
        yield


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)


def _essence(code: CodeType) -> tuple[object, ...]:
    """What a code does, wherever it stands in its file."""
    constants = (_essence(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, tuple(constants)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for holder in (module, *(each for each in vars(module).values() if inspect.isclass(each))):
        if getattr(holder, "__module__", module.__name__) != module.__name__:
            continue
        for value in vars(holder).values():
            function = inspect.unwrap(getattr(value, "__func__", value))
            is_own = isinstance(function, FunctionType) and function.__module__ == module.__name__
            if is_own and function.__code__.co_filename == module.__file__:
                yield function

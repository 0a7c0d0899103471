"""Operators of planted faults: each changes one node of a function's syntax tree, whatever its locals are named.

An operator says what kind of node it changes, and the names that this node mentions: of functions, attributes,
parameters, keywords and constants, and signs as `not` or `+=`. Names of local variables never count. Where nodes of
the kind lie in each other, the innermost is meant. There must be exactly one.

What takes the node's place is Python, in which `_` stands for the node itself and `_0`, `_1`, ... for its parts in
order. Of a call these are its arguments, `_f` is what is called, `_self` what its method is called of, and `_x` the
keyword argument x. A part that is a slice has `_1` for its beginning and `_2` for its end.
"""

import ast
import builtins
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from tests.mutants.tree import (
    COMPREHENSIONS,
    DISPLAYS,
    SIGNS,
    SIMPLE,
    Place,
    Tree,
    is_docstring,
    name_of,
    nodes_below,
    parameters,
    parts_of,
)


class Kind(Enum):
    STATEMENT = auto()
    """A statement without others in it, docstrings left out."""
    CONDITION = auto()
    """What follows `if` or `while`, also in an expression, and each operand of `and` and `or`."""
    COMPARISON = auto()
    OPERATION = auto()
    CALL = auto()
    ARGUMENT = auto()
    READ = auto()
    """A read of an attribute or of a name that is no local."""
    CONSTANT = auto()
    SUBSCRIPT = auto()
    DISPLAY = auto()
    """A list, a tuple or a set, written out."""
    ELEMENT = auto()
    """An element of a display."""
    COMPREHENSION = auto()


@dataclass(frozen=True)
class Operator:
    kind: Kind
    names: tuple[str, ...]
    """The node mentions all of them; an argument's call does."""
    to: str | None
    """Python in place of the node; None: nothing, of an element."""
    what: str | None = None
    """Function that is called, sign, name that is read, or constant, as `repr` has it."""
    which: int | str | None = None
    """Of an argument: its index or keyword."""
    beside: tuple[str, ...] = ()
    """The statement around the node mentions them."""
    nth: tuple[int, int] | None = None
    """(2, 3): of exactly three such nodes the second, in the tree's order."""

    def apply(self, function: ast.AST, globals_: set[str]) -> str:
        """Change the function's tree. Return what it changes, for people.

        globals_: names of the module that the replacement may use. Raises LookupError where the node is not found, or
        not alone, and where the replacement uses a name that the function does not have.
        """
        found = self._found(Tree(function))
        number, expected = self.nth or (1, 1)
        if len(found) != expected:
            places = "".join(f"\n    {_shown(place.node)}" for place in found)
            raise LookupError(f"{len(found)} places are {self}, expected {expected}{places}")
        place = found[number - 1]
        new = self._replacement(place.node, parameters(function) | globals_)
        shown = f"{_shown(place.node)}  ->  {'; '.join(map(_shown, new)) or 'nothing'}"
        place.put(new)
        return shown

    def __str__(self) -> str:
        words = [self.what or "", "" if self.which is None else f"[{self.which}]"]
        if self.names:
            words.append(f"with {', '.join(self.names)}")
        if self.beside:
            words.append(f"beside {', '.join(self.beside)}")
        return " ".join(word for word in (self.kind.name.lower(), *words) if word)

    def _found(self, tree: Tree) -> list[Place]:
        places = [place for place in tree.places if self._is_meant(place, tree)]
        nodes = {id(place.node) for place in places}
        # Of two that lie in each other the inner one is meant.
        return [place for place in places if not any(id(node) in nodes for node in nodes_below(place.node))]

    def _is_meant(self, place: Place, tree: Tree) -> bool:
        if not self._is_of_kind(place, tree):
            return False
        whole = place.call if self.kind is Kind.ARGUMENT else place.node
        assert whole is not None, "an argument of no call"
        return tree.mentions(whole, self.names) and (
            not self.beside or (place.statement is not None and tree.mentions(place.statement, self.beside))
        )

    def _is_of_kind(self, place: Place, tree: Tree) -> bool:
        node, parent = place.node, place.parent
        match self.kind:
            case Kind.STATEMENT:
                return isinstance(node, SIMPLE) and not is_docstring(node)
            case Kind.CONDITION:
                is_test = place.field == "test" and isinstance(parent, ast.If | ast.While | ast.IfExp)
                return is_test or place.field == "ifs" or (isinstance(parent, ast.BoolOp) and place.field == "values")
            case Kind.COMPARISON:
                return isinstance(node, ast.Compare) and [SIGNS[type(op)] for op in node.ops] == [self.what]
            case Kind.OPERATION:
                return isinstance(node, ast.BinOp) and SIGNS[type(node.op)] == self.what
            case Kind.CALL:
                return isinstance(node, ast.Call) and name_of(node.func) == self.what
            case Kind.ARGUMENT:
                has_call = place.call is not None and name_of(place.call.func) == self.what
                return has_call and place.argument == self.which
            case Kind.READ:
                is_read = isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)
                is_local = isinstance(node, ast.Name) and node.id in tree.local
                return is_read and not is_local and name_of(node) == self.what
            case Kind.CONSTANT:
                return isinstance(node, ast.Constant) and repr(node.value) == self.what
            case Kind.SUBSCRIPT:
                return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
            case Kind.DISPLAY:
                is_read = isinstance(node, ast.Set) or isinstance(getattr(node, "ctx", None), ast.Load)
                return isinstance(node, DISPLAYS) and is_read and place.field != "slice"
            case Kind.ELEMENT:
                is_of_index = isinstance(place.holder, ast.Subscript)
                return isinstance(parent, DISPLAYS) and place.field == "elts" and not is_of_index
            case Kind.COMPREHENSION:
                return isinstance(node, COMPREHENSIONS)

    def _replacement(self, node: ast.AST, known: set[str]) -> list[ast.AST]:
        if self.to is None:
            return []
        template = ast.parse(self.to)
        parts = parts_of(node)
        own = {
            each.id for each in nodes_below(template) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        own |= {each.arg for each in nodes_below(template) if isinstance(each, ast.arg)}
        for each in nodes_below(template):
            if isinstance(each, ast.Name) and each.id not in known | own | parts.keys() | set(dir(builtins)):
                raise LookupError(f"the function has no parameter or global {each.id}, which {self.to!r} uses")
        filled = _Filling(node, parts).visit(template)
        if self.kind is Kind.STATEMENT:
            return list(filled.body)
        (expression,) = filled.body
        return [expression.value]


def statement(*names: str, to: str, **where: Any) -> Operator:
    """Put other statements in place of one; `_0` is its value."""
    return Operator(Kind.STATEMENT, names, to, **where)


def drop(*names: str, **where: Any) -> Operator:
    """Leave a statement out."""
    return statement(*names, to="pass", **where)


def condition(*names: str, to: str, **where: Any) -> Operator:
    return Operator(Kind.CONDITION, names, to, **where)


def always(*names: str, **where: Any) -> Operator:
    """Have a condition hold always."""
    return condition(*names, to="True", **where)


def never(*names: str, **where: Any) -> Operator:
    """Have a condition never hold."""
    return condition(*names, to="False", **where)


def comparison(sign: str, *names: str, to: str, **where: Any) -> Operator:
    """Change a comparison of `_0` with `_1`."""
    return Operator(Kind.COMPARISON, names, to, sign, **where)


def operation(sign: str, *names: str, to: str, **where: Any) -> Operator:
    """Change an operation on `_0` and `_1`."""
    return Operator(Kind.OPERATION, names, to, sign, **where)


def call(function: str, *names: str, to: str, **where: Any) -> Operator:
    return Operator(Kind.CALL, names, to, function, **where)


def argument(function: str, which: int | str, *names: str, to: str, **where: Any) -> Operator:
    """Change one argument of a call, by its index or keyword; the call mentions the names."""
    return Operator(Kind.ARGUMENT, names, to, function, which, **where)


def read(name: str, *, to: str, **where: Any) -> Operator:
    """Change what comes where an attribute, a parameter or a global is read."""
    return Operator(Kind.READ, (), to, name, **where)


def sibling(name: str, other: str, **where: Any) -> Operator:
    """Read another attribute of the same object."""
    return read(name, to=f"_0.{other}", **where)


def constant(value: object, *, to: str, **where: Any) -> Operator:
    return Operator(Kind.CONSTANT, (), to, repr(value), **where)


def subscript(*names: str, to: str, **where: Any) -> Operator:
    """Change what is taken by an index, `_1`, or a slice, from `_1` to `_2`, of `_0`."""
    return Operator(Kind.SUBSCRIPT, names, to, **where)


def display(*names: str, to: str, **where: Any) -> Operator:
    return Operator(Kind.DISPLAY, names, to, **where)


def drop_element(*names: str, **where: Any) -> Operator:
    """Leave an element of a list, a tuple or a set out."""
    return Operator(Kind.ELEMENT, names, None, **where)


def comprehension(*names: str, to: str, **where: Any) -> Operator:
    return Operator(Kind.COMPREHENSION, names, to, **where)


class _Filling(ast.NodeTransformer):
    """Puts a node and its parts where a replacement names them."""

    def __init__(self, node: ast.AST, parts: Mapping[str, ast.AST]) -> None:
        self._node, self._parts = node, parts

    def visit_Expr(self, line: ast.Expr) -> ast.AST:
        if isinstance(self._node, ast.stmt) and isinstance(line.value, ast.Name) and line.value.id == "_":
            return copy.deepcopy(self._node)
        return self.generic_visit(line)

    def visit_Name(self, name: ast.Name) -> ast.AST:
        part = self._parts.get(name.id)
        return name if part is None or isinstance(name.ctx, ast.Store) else copy.deepcopy(part)


def _shown(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]

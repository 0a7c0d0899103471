"""The nodes of a function's syntax tree: where each is, what it mentions, and the parts that a replacement may use."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SIGNS: Mapping[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitOr: "|",
    ast.BitAnd: "&",
    ast.MatMult: "@",
    ast.Invert: "~",
    ast.Not: "not",
    ast.And: "and",
    ast.Or: "or",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Break: "break",
    ast.Continue: "continue",
    ast.Return: "return",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DISPLAYS = (ast.Tuple, ast.List, ast.Set)
SIMPLE = (
    ast.Expr,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Return,
    ast.Delete,
    ast.Raise,
    ast.Continue,
    ast.Break,
)


@dataclass(frozen=True)
class Place:
    """Where a node is."""

    node: ast.AST
    parent: ast.AST
    field: str
    index: int | None
    """Of a field that is a list."""
    holder: ast.AST | None
    """The parent's parent."""
    statement: ast.stmt | None
    """The simple statement around the node."""

    @property
    def call(self) -> ast.Call | None:
        """The call that the node is an argument of."""
        around = self.holder if isinstance(self.parent, ast.keyword) else self.parent
        return around if isinstance(around, ast.Call) and self.field != "func" else None

    @property
    def argument(self) -> int | str | None:
        if isinstance(self.parent, ast.keyword):
            return self.parent.arg
        return self.index if self.field == "args" else None

    def put(self, new: list[ast.AST]) -> None:
        if self.index is None:
            setattr(self.parent, self.field, new[0])
        else:
            getattr(self.parent, self.field)[self.index : self.index + 1] = new


class Tree:
    """A function or class: its nodes in the order of the source, and the names of its local variables."""

    def __init__(self, function: ast.AST) -> None:
        self.places = list(_places(function, None, None))
        nodes = [place.node for place in self.places]
        self.local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for node in nodes:
            if isinstance(node, (*FUNCTIONS, ast.Lambda)):
                self.local |= parameters(node)
        self.local -= parameters(function)

    def mentions(self, node: ast.AST, names: tuple[str, ...]) -> bool:
        mentioned = set[str]()
        for each in (node, *nodes_below(node)):
            mentioned |= self._names(each)
        return mentioned.issuperset(names)

    def _names(self, node: ast.AST) -> set[str]:
        match node:
            case ast.Name():
                return {node.id} - self.local
            case ast.Attribute():
                return {node.attr}
            case ast.keyword():
                return {node.arg or "**"}
            case ast.Constant(value=bytes(value)):
                return {value.decode(errors="replace")}
            case ast.Constant():
                return {str(node.value)}
            case ast.AugAssign():
                return {f"{SIGNS[type(node.op)]}="}
        return {SIGNS[type(node)]} if type(node) in SIGNS else set()


def _places(parent: ast.AST, holder: ast.AST | None, statement: ast.stmt | None) -> Iterator[Place]:
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(node, ast.AST):
                around = statement
                if isinstance(node, ast.stmt):
                    around = node if isinstance(node, SIMPLE) else None
                yield Place(node, parent, field, index if isinstance(value, list) else None, holder, around)
                yield from _places(node, parent, around)


def nodes_below(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        yield from nodes_below(child)


def parameters(function: ast.AST) -> set[str]:
    own = function.args if isinstance(function, (*FUNCTIONS, ast.Lambda)) else None
    return set() if own is None else {each.arg for each in nodes_below(own) if isinstance(each, ast.arg)}


def name_of(node: ast.AST) -> str | None:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
    return None


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def parts_of(node: ast.AST) -> dict[str, ast.AST]:
    """Return what a replacement may name of a node."""
    parts: dict[str, ast.AST] = {"_": node}
    ordered: list[ast.AST] = []
    match node:
        case ast.Call():
            ordered = [*node.args]
            parts["_f"] = node.func
            if isinstance(node.func, ast.Attribute):
                parts["_self"] = node.func.value
            parts |= {f"_{each.arg}": each.value for each in node.keywords}
        case ast.Compare():
            ordered = [node.left, *node.comparators]
        case ast.BinOp():
            ordered = [node.left, node.right]
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)):
            ordered = [node.value, lower or ast.Constant(None), upper or ast.Constant(None)]
        case ast.Subscript():
            ordered = [node.value, node.slice]
        case ast.Attribute():
            ordered = [node.value]
        case ast.Tuple() | ast.List() | ast.Set():
            ordered = [*node.elts]
        case ast.stmt():
            value = getattr(node, "value", None)
            ordered = [] if value is None else [value]
    return parts | {f"_{index}": part for index, part in enumerate(ordered)}

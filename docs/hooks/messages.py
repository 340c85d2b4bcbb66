"""Every message that the package raises, read from its source: what the site lists under docs/errors.md.

A message is written as an f-string. Its text is shown as it is, and what is filled in as a slot with the name of what stands
there. A remedy that has a name in the source, one of several, or a function that returns it, is put in its place.
"""

import ast
import builtins
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

PACKAGE = Path(__file__).resolve().parents[2] / 'mmslab'
TITLES = {
    'apis': 'Starting a run',
    'backbones': 'Backbones',
    'benchmark': 'Measuring',
    'checkpoints': 'Weights and checkpoints',
    'data': 'Data and classes',
    'deploy': 'Folding and export',
    'hooks': 'Training',
    'infer': 'Inference',
    'layers': 'Norms, attention and folding of layers',
    'necks': 'Necks',
    'plots': 'Curves',
    'versions': 'Versions',
}


class Slot(NamedTuple):
    """What is filled in."""

    name: str


class Choice(NamedTuple):
    """One of several texts, an empty one among them where it may be left out."""

    texts: Tuple['Text', ...]


Text = Tuple[Union[str, Slot, Choice], ...]


class Message(NamedTuple):
    """A ``raise`` with a message of its own."""

    module: str
    line: int
    kind: str
    text: Text

    def html(self) -> str:
        return _html(self.text)

    def pattern(self) -> str:
        """A regular expression for what a user reads, a slot being anything."""
        return _pattern(self.text)


@cache
def messages(package: Path = PACKAGE) -> Tuple[Message, ...]:
    """All messages of ``package``, a folder, by file and line.

    An error is a user's to read if its type is of Python, or derives from one that says something (ValueError, OSError, ...).
    A class of the package that is a bare Exception is caught inside of it. So a ``raise`` without a message of its own (a
    name, ``raise`` alone, an error that another process sent) is none: what it raises has been raised somewhere before.
    """
    trees = {path: ast.parse(path.read_text(encoding='utf-8')) for path in sorted(package.rglob('*.py'))}
    own = {
        node.name: [_last_name(base) for base in node.bases]
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = []
    for path, tree in trees.items():
        parts = path.relative_to(package.parent).with_suffix('').parts
        module = '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)
        for node, scopes in _raises(tree, (tree,)):
            call = node.exc
            kind = _kind(_last_name(call.func), own) if isinstance(call, ast.Call) and call.args else None
            if kind is not None:
                found.append(Message(module, node.lineno, kind, _text(call.args[0], scopes)))
    return tuple(sorted(found, key=lambda m: (m.module, m.line)))


def page(found: Optional[Sequence[Message]] = None) -> str:
    """The messages as Markdown: a section for each part of the package, the modules in it one after the other."""
    sections: Dict[str, Dict[str, List[Message]]] = {}
    for message in messages() if found is None else found:
        part = (message.module.split('.') + ['mmslab'])[1]
        sections.setdefault(part, {}).setdefault(message.module, []).append(message)
    lines = []
    for part, modules in sorted(sections.items(), key=lambda item: _title(item[0])):
        lines += [f'## {_title(part)}', '']
        for module, own in modules.items():
            lines += [f'`{module}`: {_summary(module)}', '', '<ul class="messages">']
            lines += [f'<li><span>{m.kind}</span> {m.html()}</li>' for m in own]
            lines += ['</ul>', '']
    return '\n'.join(lines)


def _title(part: str) -> str:
    return TITLES.get(part, part.replace('_', ' ').capitalize())


def _summary(module: str) -> str:
    """The first line of a module's docstring."""
    path = PACKAGE.parent.joinpath(*module.split('.'))
    path = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
    return (ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or '').partition('\n')[0]


def _raises(node: ast.AST, scopes: Tuple[ast.AST, ...]) -> Iterator[Tuple[ast.Raise, Tuple[ast.AST, ...]]]:
    """Each ``raise`` below ``node``, with the module and the functions that it is in, the innermost last."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise):
            yield child, scopes
        yield from _raises(child, (*scopes, child) if isinstance(child, ast.FunctionDef) else scopes)


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ''


def _kind(name: str, own: Dict[str, List[str]]) -> Optional[str]:
    """The type as a user knows it: of a private class the public one that it derives from; None for one that stays inside."""
    while name.startswith('_') and own.get(name):
        name = own[name][0]
    if own.get(name) == ['Exception'] or name == 'Exception':
        return None
    error = getattr(builtins, name, None)
    if isinstance(error, type) and issubclass(error, Exception) or name.endswith('Error'):
        return name
    return None


def _text(node: ast.AST, scopes: Tuple[ast.AST, ...]) -> Text:
    """What the expression ``node`` says, as far as the source tells."""
    if isinstance(node, ast.Constant):
        return (str(node.value),)
    if isinstance(node, ast.JoinedStr):
        return tuple(part for value in node.values for part in _text(value, scopes))
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, scopes)
    if isinstance(node, ast.BinOp) and _is_text(node):
        if isinstance(node.op, ast.Mult):  # by a condition
            return (Choice((_text(node.left, scopes), ())),)
        return _text(node.left, scopes) + _text(node.right, scopes)
    if isinstance(node, ast.IfExp) and (_is_text(node.body) or _is_text(node.orelse)):
        return (Choice((_text(node.body, scopes), _text(node.orelse, scopes))),)
    values = [_literal(value) for value in _assigned(_last_name(node), scopes[0])]
    if len(values) == 1 and isinstance(values[0], tuple):
        return (str(values[0]),)
    known = _known(node, scopes)
    if len(known) == 1:
        return _text(*known[0])
    if known:
        return (Choice(tuple(_text(*each) for each in known)),)
    if isinstance(node, ast.Call) and _last_name(node.func) == 'format':
        template = _known(node.func.value, scopes)
        if len(template) == 1 and isinstance(template[0][0], ast.Constant):
            pieces = template[0][0].value.split('{}')
            filled = [_text(arg, scopes) for arg in node.args]
            return (pieces[0], *(p for text, piece in zip(filled, pieces[1:]) for p in (*text, piece)))
    return (Slot(_slot(node)),)


def _literal(node: ast.AST) -> Optional[object]:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


Known = List[Tuple[ast.AST, Tuple[ast.AST, ...]]]


def _known(node: ast.AST, scopes: Tuple[ast.AST, ...]) -> Known:
    """The texts, each with its scopes, that ``node`` may stand for: a name, an entry of a dict, what a function returns."""
    if isinstance(node, ast.Name):
        for depth in range(len(scopes), 0, -1):
            values = list(_assigned(node.id, scopes[depth - 1]))
            if values:
                inner = scopes[:depth]
                return [(v, inner) for v in values] if all(map(_is_text, values)) else _returned(values, inner)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == 'get':
        tables = [v for v in _assigned(_last_name(node.func.value), scopes[0]) if isinstance(v, ast.Dict)]
        texts = [(v, scopes[:1]) for table in tables for v in table.values if _is_text(v)]
        return texts + [each for arg in node.args[1:] for each in _known(arg, scopes)] if texts else []
    elif isinstance(node, ast.Call):
        return _returned([node], scopes)
    return []


def _assigned(name: str, scope: ast.AST) -> Iterator[ast.AST]:
    for node in _own_nodes(scope):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            yield node.value


@cache
def _own_nodes(scope: ast.AST) -> Tuple[ast.AST, ...]:
    """The nodes of ``scope``, but for those of the functions in it."""
    nodes = []
    left = list(ast.iter_child_nodes(scope))[::-1]
    while left:
        nodes.append(node := left.pop())
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            left += list(ast.iter_child_nodes(node))[::-1]
    return tuple(nodes)


def _returned(values: Sequence[ast.AST], scopes: Tuple[ast.AST, ...]) -> Known:
    """The texts that a function of the module returns, if ``values`` is a call of one."""
    if len(values) != 1 or not isinstance(values[0], ast.Call) or not isinstance(values[0].func, ast.Name):
        return []
    name = values[0].func.id
    functions = [f for f in _own_nodes(scopes[0]) if isinstance(f, ast.FunctionDef) and f.name == name]
    returns = [(n.value, (scopes[0], f)) for f in functions for n in _own_nodes(f) if isinstance(n, ast.Return)]
    return [each for each in returns if each[0] is not None and _is_text(each[0])]


def _slot(node: ast.AST) -> str:
    """A name for what is filled in, as short as the source has one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return 'class' if node.attr == '__name__' else node.attr
    if isinstance(node, ast.Subscript):
        key = node.slice
        return str(key.value) if isinstance(key, ast.Constant) and isinstance(key.value, str) else _slot(node.value)
    if isinstance(node, ast.Call):
        name = _last_name(node.func)
        if name == 'len':
            return f'number of {_slot(node.args[0])}'
        if name == 'get' and node.args and isinstance(node.args[0], ast.Constant):
            return str(node.args[0].value)
        return _slot(node.args[-1 if name in ('map', 'getattr') else 0]) if node.args else name
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return _slot(node.generators[0].iter)
    if isinstance(node, ast.BoolOp):
        return _slot(node.values[0])
    if isinstance(node, ast.IfExp):
        return _slot(node.body)
    if isinstance(node, (ast.BinOp, ast.UnaryOp)):
        return _slot(node.left if isinstance(node, ast.BinOp) else node.operand)
    return ast.unparse(node)


def _html(text: Text) -> str:
    return ''.join(
        f'<var>{escape(part.name)}</var>'
        if isinstance(part, Slot)
        else _html_choice(part)
        if isinstance(part, Choice)
        else escape(part).replace('\n', ' ')
        for part in text
    )


def _html_choice(choice: Choice) -> str:
    texts = [_html(text) for text in choice.texts]
    inner = ' <i>or</i> '.join(text for text in texts if text)
    return f'<span class="choice">{inner}</span>'


def _pattern(text: Text) -> str:
    return ''.join(
        '.*'
        if isinstance(part, Slot)
        else f'(?:{"|".join(map(_pattern, part.texts))})'
        if isinstance(part, Choice)
        else re.escape(part)
        for part in text
    )

"""The documentation: links, commands, snippets, the list of messages, the picture. Nothing is fetched, mkdocs is not needed."""

import argparse
import ast
import builtins
import importlib
import math
import pkgutil
import re
import runpy
import shlex
import sys
import textwrap

import pytest
import torch
import yaml
from mmengine.config import Config

from mmslab.backbones import SLABSwin
from mmslab.checkpoints import load_pretrained
from mmslab.cli import main as mmslab_main
from mmslab.deploy import fold
from mmslab.hooks import BNRecalibrationHook, GammaDecayHook
from mmslab.layers import set_gamma

from .conftest import ROOT, assert_relative

DOCS = ROOT / 'docs'
TOP = [ROOT / name for name in ('README.md', 'CONTRIBUTING.md', 'SECURITY.md', 'CHANGELOG.md')]
PAGES = TOP + sorted(DOCS.glob('*.md'))
FENCE = re.compile(r'^ *```(\w*)([^\n]*)\n(.*?)^ *```', re.M | re.S)


def hook(name):
    """A module of docs/hooks, which mkdocs loads with their folder in the path."""
    sys.path.insert(0, str(DOCS / 'hooks'))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS / 'hooks'))


def prose(page):
    return FENCE.sub('', page.read_text())


def fences(page, *languages):
    for match in FENCE.finditer(page.read_text()):
        if match[1] in languages:
            yield match[2].strip(), textwrap.dedent(match[3])


def anchors(page):
    headings = re.findall(r'^#+ +(.+)$', prose(page), re.M)
    return {re.sub(r'[^\w\- ]', '', h.lower()).strip().replace(' ', '-') for h in headings}


def ids(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize('page', PAGES, ids=ids)
def test_links_lead_somewhere(page):
    for target in re.findall(r'\]\(([^)\s]+)\)', re.sub(r'`[^`\n]*`', '', prose(page))):
        if '://' in target:
            assert re.fullmatch(r'https?://[\w.-]+\.\w+(/[^\s]*)?', target), target
            continue
        path, _, anchor = target.partition('#')
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), f'{target}: there is no {to}'
        assert not anchor or anchor in anchors(to), f'{target}: no such heading'


@pytest.mark.parametrize('page', PAGES, ids=ids)
def test_python_snippets_and_names_are_real(page):
    for _, code in fences(page, 'python', 'py'):
        compile(code, str(page), 'exec')
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'mmslab':
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert hasattr(module, name.name), f'{page}: {node.module} has no {name.name}'
    for name in re.findall(r'`(mmslab(?:\.\w+)+)', prose(page)):
        pkgutil.resolve_name(name)
    for path in re.findall(r'`((?:configs|tools|docs|tests|mmslab)/[\w/.-]+)`', prose(page)):
        assert (ROOT / path).exists(), f'{page}: there is no {path}'


class Parsed(Exception):
    pass


def commands(page):
    """The simple commands in the fences of a page, each a list of words, without variables before it."""
    for _, code in fences(page, 'bash', 'console', 'sh'):
        for line in code.replace('\\\n', ' ').splitlines():
            for simple in re.split(r'&&|\|\||[;|]', re.sub(r'(^|\s)#.*', '', line)):
                words = shlex.split(simple.strip().lstrip('$').strip())
                while words and re.match(r'\w+=', words[0]):
                    words.pop(0)
                if words:
                    yield words


def parse(words):
    """Gives the words after a tool's name to its own parser; None for a command that is none of ours."""
    tool = next((i for i, word in enumerate(words) if re.fullmatch(r'(.*/)?tools/\w+\.(py|sh)', word)), None)
    if words[0] == 'mmslab':
        return mmslab_main(words[1:])
    if tool is None:
        return None
    name, args = words[tool].rpartition('/')[2], words[tool + 1 :]
    if name.startswith('dist_'):
        given = 2 if name == 'dist_train.sh' else 3  # the last of them is the number of GPUs
        assert len(args) >= given and (args[given - 1].isdigit() or args[given - 1].isupper()), words
        name, args = name[5:-3] + '.py', args[: given - 1] + args[given:]
    if name.endswith('.sh'):
        assert (ROOT / 'tools' / name).exists(), words
        return None
    main = runpy.run_path(str(ROOT / 'tools' / name), run_name='docs')['main']
    sys.argv[:] = [name, *args]
    return main()


@pytest.mark.parametrize('page', PAGES, ids=ids)
def test_commands_are_taken(page, monkeypatch, capsys):
    """By the parsers themselves, which stop when they have parsed."""
    monkeypatch.setattr(sys, 'argv', list(sys.argv))
    for how in ('parse_args', 'parse_intermixed_args'):
        original = getattr(argparse.ArgumentParser, how)

        def parsed(self, *args, _original=original, **kwargs):
            result = _original(self, *args, **kwargs)
            if self.prog == 'mmslab':  # which hands on to the parser of the command
                return result
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, how, parsed)
    for words in commands(page):
        try:
            parse(words)
        except Parsed:
            pass
        except SystemExit as e:
            said = capsys.readouterr()
            assert e.code in (0, None), f'{" ".join(words)}: {said.err.strip().splitlines()[-1:]}'


def test_nav_has_every_page():
    def leaves(node):
        if isinstance(node, str):
            yield node
        else:
            for child in node if isinstance(node, list) else node.values():
                yield from leaves(child)

    config = yaml.safe_load((ROOT / 'mkdocs.yml').read_text())
    listed = list(leaves(config['nav']))
    made = [uri for name, uri in hook('site_hooks').PAGES.items() if name != 'README.md']
    assert sorted(listed) == sorted([page.name for page in DOCS.glob('*.md')] + made)
    assert config['theme']['font'] is False and config['validation']['links']['anchors'] == 'warn'


def test_links_of_the_site():
    """From the repository's to the site's: pages, files that it takes in, folders that it has not, lists set apart."""
    taken = []
    text = (
        'See [a](../configs/demo), [b](../SECURITY.md#what-is-not), [c](weights.md), `[d](x)`,\n'
        '[e](../setup.py):\n- one\n- two'
    )
    made = hook('site_hooks').loosen(text, 'training.md', taken)
    assert made == (
        'See a, [b](security.md#what-is-not), [c](weights.md), `[d](x)`,\n[e](files/setup.py):\n\n- one\n- two'
    )
    assert taken == ['setup.py']
    assert hook('site_hooks').loosen('[x](docs/errors.md)', 'changelog.md') == '[x](errors.md)'


def raised_in_source():
    """(file, line) of each ``raise`` of a type of Python with something in its brackets, by the text alone."""
    for path in (ROOT / 'mmslab').rglob('*.py'):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*raise (\w+)\((?!\))', line)
            if match and isinstance(getattr(builtins, match[1], None), type):
                yield '.'.join(path.relative_to(ROOT).with_suffix('').parts), number


def test_every_message_is_listed():
    found = hook('messages').messages()
    places = {(m.module, m.line) for m in found}
    missing = {(m.removesuffix('.__init__'), n) for m, n in raised_in_source()} - places
    assert len(places) > 200 and not missing
    page = hook('messages').page(found)
    assert all(message.html() in page for message in found)
    assert '<li><span>ValueError</span> unit must be one of (' in page  # a constant is shown


def listed_as(error):
    return [m for m in hook('messages').messages() if re.fullmatch(m.pattern(), str(error), re.S)]


@pytest.mark.parametrize(
    'provoke',
    [
        lambda: GammaDecayHook(unit='year'),
        lambda: BNRecalibrationHook(),
        lambda: SLABSwin(arch='huge'),
        lambda: SLABSwin(attn='none'),
        lambda: set_gamma(torch.nn.Linear(1, 1), 0),
        lambda: load_pretrained(torch.nn.Linear(1, 1), {'x': torch.zeros(1)}),
        lambda: SLABSwin(norm_cfg=dict(type='No')),
    ],
)
def test_what_a_user_reads_is_listed(provoke):
    with pytest.raises(ValueError) as error:
        provoke()
    assert [m for m in listed_as(error.value) if m.kind == 'ValueError'], error.value


def test_common_errors_quote_messages():
    """What the page says that a message says, one does."""
    rows = [line for line in (DOCS / 'errors.md').read_text().splitlines() if line.startswith('| ')][1:]
    texts = [re.sub(r'\\(.)', r'\1', m.pattern()) for m in hook('messages').messages()]
    quoted = [piece for row in rows[1:] for piece in re.findall(r'`([^`]+)`', row.split(' | ')[1])]
    assert len(quoted) > 10
    for piece in quoted:
        if not piece.startswith('import'):
            assert any(piece in text for text in texts), piece


def test_gamma_is_drawn_as_the_page_says():
    schedules = hook('schedules')
    T, hold, steps = schedules.T, schedules.HOLD, schedules.NUM_STEPS
    formulas = dict(
        linear=lambda u: 1 - u,
        cosine=lambda u: (1 + math.cos(math.pi * u)) / 2,
        step=lambda u: 1 - math.floor(u * steps + 1e-9) / steps,
    )
    drawn = schedules.curves()
    assert set(drawn) == set(formulas)
    for name, (places, gammas) in drawn.items():
        expected = [formulas[name](min(max(t - hold, 0) / T, 1)) for t in places]
        assert gammas == pytest.approx(expected, abs=1e-12)
        assert gammas[0] == 1 and gammas[-1] == 0


def test_the_example_of_a_new_attention_trains_and_folds(tmp_path, monkeypatch):
    files = {title.split('"')[1]: code for title, code in fences(DOCS / 'adding-attention.md', 'python') if title}
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    (tmp_path / 'configs').symlink_to(ROOT / 'configs')
    monkeypatch.syspath_prepend(str(tmp_path))
    backbone = Config.fromfile(tmp_path / 'maskrcnn_hydra.py').model.backbone
    assert backbone.attn == ('HydraAttention', 'sla', 'softmax', 'softmax')
    torch.manual_seed(0)
    model = SLABSwin(**{k: v for k, v in backbone.items() if k not in ('type', '_scope_')})
    attention = [m for m in model.modules() if type(m).__name__ == 'HydraAttention']
    assert len(attention) == 2
    before = [p.detach().clone() for m in attention for p in m.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    sum(out.square().mean() for out in model(torch.randn(2, 3, 64, 96))).backward()
    optimizer.step()
    assert all(not torch.equal(a, p) for a, p in zip(before, (p for m in attention for p in m.parameters())))
    set_gamma(model, 0)
    model.eval()
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = model(image)
        folded = fold(model)(image)
    assert not any('repbn' in name for name, _ in model.named_modules())
    for a, b in zip(folded, expected):
        assert_relative(a, b, 1e-5)

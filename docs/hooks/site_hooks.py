"""Hooks of mkdocs: what the site has beyond the pages in docs/, all of it made from the repository when it is built.

* the marks ``<!-- made: errors -->``, ``gamma`` and ``api`` become the list of all messages, a picture, and a list of pages;
* ``gamma.svg`` and the pages below ``api/`` are added, and the repository's own CHANGELOG, CONTRIBUTING and SECURITY;
* links in a page are those of the repository, so that they work where it is read there. A link to one of these pages or to
  README.md becomes one to the page; one to any other file of the repository takes the file into the site; folders lose theirs.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any, Dict, List, Optional

from messages import messages, page
from schedules import picture

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    'README.md': 'index.md',
    'CHANGELOG.md': 'changelog.md',
    'CONTRIBUTING.md': 'contributing.md',
    'SECURITY.md': 'security.md',
}
NOT_API = ('__init__', '__main__', 'cli', 'version', 'worker')
_CODE = re.compile(r'(^ *```.*?^ *```|`[^`\n]+`)', re.M | re.S)
_LINK = re.compile(r'(!?\[[^\]]*\])\(([^)\s]+)\)')
_ROLE = re.compile(r':(?:class|meth|func|mod|attr|data):(<code>)[~]?')


def on_config(config: Any) -> Any:
    for section in config.nav:
        if 'API reference' in section:
            section['API reference'] += list(api_pages())
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File  # here, so that all else can be tried without mkdocs

    made = {'gamma.svg': picture(), **api_pages()}
    made.update({uri: (ROOT / name).read_text(encoding='utf-8') for name, uri in PAGES.items() if name != 'README.md'})
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    from mkdocs.structure.files import File

    uri = page.file.src_uri
    if uri.startswith('api/'):
        return markdown
    taken: List[str] = []
    markdown = loosen(made_here(markdown), uri, taken)
    for path in taken:
        if files.get_file_from_path(f'files/{path}') is None:
            files.append(File.generated(config, f'files/{path}', abs_src_path=str(ROOT / path)))
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """The docstrings' roles, :class:`X`, are code."""
    return _ROLE.sub(r'\1', html)


def made_here(markdown: str) -> str:
    """``markdown`` with what is made in the place of the marks."""
    if '<!-- made: errors -->' in markdown:
        found = messages()
        markdown = markdown.replace('<!-- made: errors -->', f'{len(found)} messages.\n\n{page(found)}')
    markdown = markdown.replace('<!-- made: gamma -->', '![gamma over a training, by schedule](gamma.svg)')
    listed = '\n'.join(f'- [{uri[4:-3]}]({uri})' for uri in api_pages())
    return markdown.replace('<!-- made: api -->', listed)


def loosen(markdown: str, uri: str, taken: Optional[List[str]] = None) -> str:
    """``markdown`` of the page ``uri``, with the site's links; ``taken`` gets the files of the repository that it needs.

    And with an empty line before each list and table, which Python-Markdown needs and the repository's readers do not.
    """
    taken = [] if taken is None else taken
    pieces = _CODE.split(markdown)
    for i in range(0, len(pieces), 2):
        pieces[i] = _LINK.sub(lambda match: _site_link(match, uri, taken), pieces[i])
    lines: List[str] = []
    fenced = False
    for line in ''.join(pieces).split('\n'):
        if not fenced and lines and _begins_block(line) and _is_paragraph(lines[-1]):
            lines.append('')
        fenced ^= line.lstrip().startswith('```')
        lines.append(line)
    return '\n'.join(lines)


def _begins_block(line: str) -> bool:
    return bool(re.match(r'([-*+] |1[.)] |\|)', line))


def _is_paragraph(line: str) -> bool:
    return bool(re.match(r'[^\s#|>]', line)) and not re.match(r'([-*+]|\d+[.)]) ', line)


def _site_link(match: 're.Match[str]', uri: str, taken: List[str]) -> str:
    text, target = match.groups()
    path, mark, anchor = target.partition('#')
    if not path or '://' in path or path.startswith('mailto:'):
        return match.group()
    names = {page: name for name, page in PAGES.items() if name != 'README.md'}
    source = ROOT / names[uri] if uri in names else ROOT / 'docs' / uri
    full = Path(posixpath.normpath((source.parent / path).as_posix()))
    name = full.relative_to(ROOT).as_posix() if ROOT in full.parents else ''
    if name in PAGES:
        place = PAGES[name]
    elif name.startswith('docs/') or not name:
        place = name[len('docs/') :] or path
    elif full.is_dir():
        return text.strip('[]')
    elif full.is_file():
        taken.append(name)
        place = f'files/{name}'
    else:
        return match.group()  # which the strict build refuses
    return f'{text}({posixpath.relpath(place, posixpath.dirname(uri) or ".")}{mark}{anchor})'


def api_pages() -> Dict[str, str]:
    """A page for each part of the package, and one for the modules at its top: mkdocstrings fills them from the docstrings."""
    package = ROOT / 'mmslab'
    pages, top = {}, []
    for path in sorted(package.iterdir()):
        if path.stem in NOT_API or path.name.startswith('_'):
            continue
        if path.suffix == '.py':
            top.append(f'mmslab.{path.stem}')
        elif (path / '__init__.py').exists():
            modules = [f'mmslab.{path.name}.{p.stem}' for p in sorted(path.glob('*.py')) if p.stem not in NOT_API]
            pages[f'api/{path.name}.md'] = _api_page(f'mmslab.{path.name}', path / '__init__.py', modules)
    return {'api/mmslab.md': _api_page('mmslab', package / '__init__.py', top), **pages}


def _api_page(name: str, init: Path, modules: List[str]) -> str:
    said = ast.get_docstring(ast.parse(init.read_text(encoding='utf-8'))) or ''
    said = re.sub(r':(?:class|meth|func|mod):`~?', '`', said)
    return '\n\n'.join([f'# {name}', said, *(f'::: {module}' for module in modules)]) + '\n'

"""Published weights by name, from a server on this machine."""

import http.server
import io
import multiprocessing
import re
import socket
import threading

import pytest
import torch
from mmengine.config import Config

from mmslab.apis import build_trainer
from mmslab.backbones import SLABSwin
from mmslab.checkpoints import RELEASES, Release, convert, load_file, locate
from mmslab.checkpoints import releases as releases_module
from mmslab.checkpoints.download import cached
from mmslab.cli import main

from ..conftest import ROOT, LocalServer, randomize

ARCH = dict(embed_dims=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))


def bytes_of(content) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


class Files(http.server.BaseHTTPRequestHandler):
    """Serves ``server.files``, as its settings say; notes each request's range."""

    def do_GET(self):
        server = self.server
        server.asked.append(self.headers.get('Range'))
        content = server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        total = len(content) + server.claims_more
        begin = (
            int(re.findall(r'\d+', self.headers['Range'])[0]) if self.headers.get('Range') and server.ranges else None
        )
        if begin is not None and begin >= total:
            self.send_response(416)
            self.send_header('Content-Range', f'bytes */{total}')
            self.send_header('Content-Length', '0')
            return self.end_headers()
        self.send_response(200 if begin is None else 206)
        if begin is not None:
            self.send_header('Content-Range', f'bytes {begin + server.shift}-{total - 1}/{total}')
        body = content[begin or 0 :]
        if server.says_length:
            self.send_header('Content-Length', str(total - (begin or 0)))
        self.end_headers()
        broken = server.breaks and server.breaks.pop(0)
        self.wfile.write(body[:broken] if broken else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with the one release of a name, and torch's cache in an empty folder."""
    server = LocalServer(Files)
    server.weights = randomize(SLABSwin(arch=ARCH)).state_dict()
    content = bytes_of(dict(model=server.weights))
    server.files, server.content = {'/tiny.pth': content}, content
    server.asked, server.breaks, server.claims_more = [], [], 0
    server.ranges, server.says_length, server.shift = True, True, 0
    server.address = f'http://127.0.0.1:{server.server_port}/tiny.pth'
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'torch'))
    monkeypatch.setitem(releases_module.RELEASES, 'tiny', Release(server.address, 'SLABSwin', 'here'))
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def kept(server):
    """The half files."""
    return list(cached(server.address).parent.glob('*.part'))


def is_whole(server):
    return cached(server.address).read_bytes() == server.content and not kept(server)


def test_a_backbone_by_name(server, capfd):
    model = SLABSwin(arch=ARCH, init_cfg=dict(type='Pretrained', checkpoint='tiny'))
    model.init_weights()
    assert all(torch.equal(v, server.weights[k]) for k, v in model.state_dict().items())
    assert is_whole(server) and 'tiny.pth' in capfd.readouterr().err  # the progress bar
    model.init_weights()
    convert('tiny', 'converted.pth')
    assert server.asked == [None]  # once


def test_mmdets_swin_by_name_within_safe_loading(server):
    """mmengine's own loading takes names too, of any model."""
    from mmengine.model import BaseModule

    from mmslab.checkpoints import use_safe_loading

    server.files['/tiny.pth'] = bytes_of(
        dict(state_dict={'fc.weight': torch.full((1, 1), 5.0), 'fc.bias': torch.ones(1)})
    )

    class Net(BaseModule):
        def __init__(self):
            super().__init__(dict(type='Pretrained', checkpoint='tiny'))
            self.fc = torch.nn.Linear(1, 1)

    net = Net()
    with use_safe_loading():
        net.init_weights()
    assert float(net.fc.weight) == 5


def test_a_file_of_that_name_wins(server, tmp_path):
    torch.save(dict(a=torch.ones(1)), tmp_path / 'tiny')
    assert load_file('tiny')['a'] == 1 and not server.asked
    (tmp_path / 'tiny').unlink()
    (tmp_path / 'tiny').mkdir()  # a folder is no checkpoint
    assert 'model' in load_file('tiny')


def test_names_that_nobody_has():
    for given, near in (('slab_swin_tny', 'slab_swin_tiny'), ('weights/slab_swin_tiny.pth', 'slab_swin_tiny')):
        with pytest.raises(FileNotFoundError, match=f"'{given}' does not exist.* Is it the name '{near}'.*--list"):
            locate(given)
    with pytest.raises(FileNotFoundError, match='have that name. Give the path of a .pth file'):
        locate('my_model.pth')


def test_a_broken_connection_goes_on_where_it_ended(server):
    server.breaks = [1000, 2000, None]
    assert locate('tiny') == str(cached(server.address))
    assert server.asked == [None, 'bytes=1000-', 'bytes=3000-'] and is_whole(server)


def test_an_interrupted_download_goes_on_in_the_next_run(server):
    server.breaks = [1000] + 3 * [-len(server.content)]  # then the server sends nothing any more
    with pytest.raises(OSError, match='it ended after 1,000 of .*kept, and completed next time'):
        locate('tiny')
    assert not cached(server.address).exists() and [p.stat().st_size for p in kept(server)] == [1000]
    server.asked.clear()
    locate('tiny')
    assert server.asked == ['bytes=1000-'] and is_whole(server)


def test_all_was_there_but_its_name(server):
    """Killed between the last byte and the new name."""
    server.breaks = [1000] + 3 * [-len(server.content)]
    with pytest.raises(OSError):
        locate('tiny')
    (part,) = kept(server)
    part.write_bytes(server.content)
    locate('tiny')
    assert is_whole(server)
    cached(server.address).unlink()
    part.write_bytes(server.content + b'of another file')
    locate('tiny')
    assert is_whole(server)


def test_a_server_without_ranges_sends_all_of_it_again(server):
    server.ranges, server.breaks = False, [1000, None]
    locate('tiny')
    assert server.asked == [None, 'bytes=1000-'] and is_whole(server)


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(claims_more=5), 'it ended after .* of .* bytes'),
        (dict(says_length=False), 'the server does not say how long it is'),
        (dict(breaks=[1000, None], shift=7), 'sends another part than it was asked for'),
        (dict(files={}), 'HTTP Error 404'),
    ],
)
def test_what_is_not_whole_is_not_used(server, settings, message):
    vars(server).update(settings)
    where = re.escape(str(cached(server.address)))
    with pytest.raises(
        OSError,
        match=rf"'tiny' cannot be downloaded from {server.address} .*{message}.*give its path, or put it at '{where}'",
    ):
        locate('tiny')
    assert not cached(server.address).exists()


def test_offline_there_is_one_error(server, monkeypatch):
    """Before anything is built or written, with the address and the place; and the place works."""
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))
        nowhere = f'http://127.0.0.1:{unused.getsockname()[1]}/tiny.pth'
    monkeypatch.setitem(releases_module.RELEASES, 'tiny', Release(nowhere, 'SLABSwin', 'here'))
    with pytest.raises(OSError, match=f'cannot be downloaded from {nowhere} .*Connection refused.*put it at') as e:
        locate('tiny')
    place = re.search(r"put it at '(.*?)'", str(e.value))[1]
    with open(place, 'wb') as f:
        f.write(server.content)
    assert load_file('tiny')['model'].keys() == server.weights.keys()


def test_a_training_by_name(server, tmp_path, monkeypatch):
    """Weights are fetched before a runner is built; a wrong name, and a server that is away, are errors of the config."""
    from mmslab.data.shapes import make_shapes

    make_shapes(tmp_path / 'shapes', num_train=4, num_val=2, size=64, progress=False)
    monkeypatch.setenv('SHAPES_ROOT', str(tmp_path / 'shapes'))
    config = ROOT / 'configs' / 'demo' / 'maskrcnn_slab_swin_shapes.py'

    def trainer(name):
        init = dict(_delete_=True, type='Pretrained', checkpoint=name)
        return build_trainer(config, work_dir='out', options={'model.backbone.init_cfg': init})

    with pytest.raises(FileNotFoundError, match="weights of SLABSwin.*Is it the name 'slab_swin_tiny'.*init_cfg=None"):
        trainer('slab_swin_tiiny')
    server.files.clear()
    with pytest.raises(OSError, match='weights of SLABSwin: checkpoint .* cannot be downloaded.*404.*init_cfg=None'):
        trainer('tiny')
    server.files['/tiny.pth'] = server.content
    assert trainer('tiny') and is_whole(server)


def _locate(address, barrier):
    barrier.wait()
    locate(address)


def test_of_two_processes_one_downloads(server):
    context = multiprocessing.get_context('fork')
    barrier = context.Barrier(2)
    processes = [context.Process(target=_locate, args=(server.address, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert server.asked == [None] and is_whole(server)


def test_of_two_addresses_with_one_file_name_none_completes_the_other(server):
    server.breaks = [1000] + 3 * [-len(server.content)]
    with pytest.raises(OSError):
        locate('tiny')
    server.files['/other/tiny.pth'] = server.content
    server.asked.clear()
    locate(server.address.replace('tiny.pth', 'other/tiny.pth'))
    assert server.asked == [None] and cached(server.address).read_bytes() == server.content


def test_what_is_downloaded_is_read_as_data(server):
    class Harmful:
        def __reduce__(self):
            return print, ('it ran',)

    server.files['/tiny.pth'] = bytes_of(dict(model=server.weights, meta=Harmful()))
    with pytest.raises(ValueError, match='tiny.pth.* holds Python objects beside tensors'):
        load_file('tiny')


def test_weights_that_were_averaged(server):
    """CSWin's files have them alone, under a name of timm's."""
    server.files['/tiny.pth'] = bytes_of(dict(state_dict_ema=server.weights, epoch=300))
    model = SLABSwin(arch=ARCH, init_cfg=dict(type='Pretrained', checkpoint='tiny'))
    model.init_weights()
    assert all(torch.equal(v, server.weights[k]) for k, v in model.state_dict().items())


def test_the_table():
    authors = [n for n, r in RELEASES.items() if r.source == 'github.com/xinghaochen/SLAB']
    assert len(authors) == 12 and 'slab_swin_tiny' in authors
    assert RELEASES['cswin_base_224'].address.endswith('/CSWin-Transformer/releases/download/v0.1.0/cswin_base_224.pth')
    assert len({cached(r.address).name for r in RELEASES.values()}) == len(RELEASES)
    assert all(r.address.startswith('https://') for r in RELEASES.values())


def test_the_docs_have_the_table():
    text = (ROOT / 'docs' / 'weights.md').read_text()
    rows = re.findall(r'^\| `(\w+)` \| `(\w+)` \| \[[^]]*\]\(https://(\S+)\) \| <(\S+)> \|$', text, re.M)
    assert {name: Release(address, family, source) for name, family, source, address in rows} == RELEASES


def test_the_command_line_lists_the_names(capsys):
    with pytest.raises(SystemExit) as e:
        main(['convert', '--list'])
    out = capsys.readouterr().out
    assert e.value.code == 0 and all(name in out for name in RELEASES)


def test_the_configs_use_names(monkeypatch):
    """But for the two whose weights nobody publishes as a file at an address."""
    files, found = {}, {}
    for path in sorted((ROOT / 'configs').glob('*.py')):
        for variable, name in re.findall(r"checkpoint='{{\$(\w+):(.*?)}}'", path.read_text()):
            (files if name not in RELEASES else found)[path.stem] = name, variable
    assert files.keys() == {'maskrcnn_flatten_swin_t_1x', 'maskrcnn_swin_s_prepbn_1x'} and len(found) == 14
    for stem, (name, _) in found.items():
        family = next(f for f in ('SLABCSWin', 'SLABPVT', 'SLABSwin') if f[4:].lower() in stem)
        assert RELEASES[name].family == family, stem
    monkeypatch.setenv('PVT_T', 'my.pth')
    cfg = Config.fromfile(str(ROOT / 'configs' / 'maskrcnn_pvt_t_1x.py'))
    assert cfg.model.backbone.init_cfg.checkpoint == 'my.pth'

import os
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
version: dict = {}
exec((here / 'mmslab' / 'version.py').read_text(), version)


class BuildWithConfigs(build_py):
    """Puts what is beside the package into mmslab/.mim, where mmengine and mim look; links it there for an editable install."""

    def run(self):
        super().run()
        target = here / 'mmslab' / '.mim' if self.editable_mode else Path(self.build_lib) / 'mmslab' / '.mim'
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build, with configs that are no more
        target.mkdir(parents=True)
        for name in ('configs', 'tools', 'model-index.yml'):
            if self.editable_mode:
                os.symlink(f'../../{name}', target / name)
            elif (here / name).is_dir():
                shutil.copytree(here / name, target / name, ignore=shutil.ignore_patterns('__pycache__'))
            else:
                shutil.copy(here / name, target / name)


setup(
    name='mmslab',
    version=version['__version__'],
    description='Efficient SLAB backbones (PRepBN, simplified linear attention) for MMDetection',
    long_description=(here / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    cmdclass=dict(build_py=BuildWithConfigs),
    packages=find_packages(include=['mmslab', 'mmslab.*']),
    entry_points=dict(console_scripts=['mmslab = mmslab.cli:main']),
    # from the oldest to the newest that all tests pass with: make test STACK=openmmlab, make test
    python_requires='>=3.11,<3.12',
    # mmengine, mmcv and mmdet exist under two distribution names each, so they are checked at import, not listed here
    install_requires=[
        'torch>=2.1.2,<2.12',
        'numpy>=1.26.4,<2.3',
        'filelock>=3.13.1',
        'fvcore>=0.1.5.post20221221',
        'matplotlib>=3.8.2',
        'pycocotools>=2.0.7',
        'rich>=13.7.0',
        'tensorboard>=2.17.1',
    ],
)

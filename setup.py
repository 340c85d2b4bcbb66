from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version: dict = {}
exec((here / 'mmslab' / 'version.py').read_text(), version)

setup(
    name='mmslab',
    version=version['__version__'],
    description='Efficient SLAB backbones (PRepBN, simplified linear attention) for MMDetection',
    long_description=(here / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=find_packages(include=['mmslab', 'mmslab.*']),
    entry_points=dict(console_scripts=['mmslab = mmslab.cli:main']),
    # from the oldest to the newest that all tests pass with: make test STACK=openmmlab, make test
    python_requires='>=3.11,<3.12',
    # mmengine, mmcv and mmdet exist under two distribution names each, so they are checked at import, not listed here
    install_requires=[
        'torch>=2.1.2,<2.12',
        'numpy>=1.26.4,<2.3',
        'fvcore>=0.1.5.post20221221',
        'pycocotools>=2.0.7',
        'rich>=13.7.0',
        'matplotlib>=3.8.2',
    ],
)

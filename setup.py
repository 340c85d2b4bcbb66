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
    python_requires='>=3.9',
    # mmengine, mmcv and mmdet exist under two distribution names each, so they are checked at import, not listed here
    install_requires=['torch>=2.1', 'numpy', 'filelock', 'fvcore', 'pycocotools', 'rich', 'matplotlib'],
)

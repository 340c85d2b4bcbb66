"""What each label stands for, in the data sets, the model and a checkpoint: compared before a run."""

import inspect
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence, Tuple, Type

from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.registry import DATASETS, MODELS, Registry

Labels = Tuple[str, ...]

# Parts of a model whose num_classes counts something else: foreground, stuff, identities, pre-training classes
_OTHERS = {'rpn_head', 'reid', 'backbone', 'neck', 'teacher', 'init_cfg'}


def check_classes(cfg: Config, splits: Tuple[str, ...] = ('train', 'val')) -> None:
    """Checks that the model's heads and the data sets of ``splits`` mean the same by a label.

    The heads are compared with the first split, all other data sets with its first. Where a data set's classes are known
    only after loading it (OpenImages), or are given to the model as text (``return_classes=True``), nothing is compared.

    Raises:
        ValueError: For a head with another number of classes than the data set, naming its config keys; for data sets
            with different classes, or the same in another order; for class names that are no sequence of different names.
    """
    scope = cfg.get('default_scope')
    found = [list(_named_datasets(cfg, split, scope)) for split in splits]
    if found[0]:
        path, dataset, names, _ = found[0][0]
        _check_heads(cfg, path, dataset, names, scope)
    named = [each for split in found for each in split]
    for path, _, names, folders in named[1:]:
        first_path, _, first_names, first_folders = named[0]
        _check_same(first_path, first_names, path, names)
        if first_folders and folders:
            _check_same(first_path, first_folders, path, folders)


def check_trained_classes(checkpoint: Any, name: str, cfg: Config, split: str = 'test') -> None:
    """Checks that ``checkpoint``, what its file holds, was trained on the classes of ``cfg``'s data, in their order.

    Checkpoints of mmengine's runner say what they were trained on; of others nothing is asked.

    Raises:
        ValueError: If both are known and differ; it calls the checkpoint ``name``.
    """
    trained = trained_classes(checkpoint)
    if trained is None:
        return
    for path, _, names, _ in _named_datasets(cfg, split, cfg.get('default_scope')):
        _check_same(f'the training of checkpoint {name}', trained, path, names)


def trained_classes(checkpoint: Any) -> Optional[Labels]:
    """The names of the classes that ``checkpoint``, what its file holds, was trained on; None if it does not say."""
    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    if not isinstance(meta, dict):
        return None
    of_data = meta.get('dataset_meta', {'classes': meta.get('CLASSES')})  # CLASSES: OpenMMLab's older releases
    trained = {str(k).lower(): v for k, v in of_data.items()}.get('classes') if isinstance(of_data, dict) else None
    return tuple(trained) if isinstance(trained, (list, tuple)) and trained else None


def datasets(node: Any, path: str) -> Iterator[Tuple[str, Mapping]]:
    """The data sets in a config node and where each is, those inside wrappers (RepeatDataset, ConcatDataset...) too."""
    if isinstance(node, (list, tuple)):
        for i, each in enumerate(node):
            yield from datasets(each, f'{path}.{i}')
    elif isinstance(node, dict):
        inner = [key for key in ('dataset', 'datasets') if isinstance(node.get(key), (dict, list, tuple))]
        for key in inner:
            yield from datasets(node[key], f'{path}.{key}')
        if not inner:
            yield path, node


def type_name(cfg: Mapping) -> str:
    """The type of a config, a name or a class, without its scope or module."""
    kind = cfg.get('type')
    return getattr(kind, '__name__', str(kind)).rsplit('.', 1)[-1]


def find_class(registry: Registry, cfg: Mapping, scope: Optional[str]) -> Optional[Type]:
    """The class that ``cfg`` names as its type; None if ``registry`` has none of that name."""
    kind = cfg.get('type')
    if not isinstance(kind, str):
        return kind
    with registry.switch_scope_and_registry(cfg.get('_scope_') or scope) as local:
        return local.get(kind)


def class_names(dataset: Mapping, scope: Optional[str], path: str) -> Optional[Labels]:
    """The name of each label of a data set: what its config says, else its class, else its folders; None if none does.

    Raises:
        ValueError: If the config gives a name twice, or something else than a sequence or a file of names.
    """
    given = (dataset.get('metainfo') or {}).get('classes') or dataset.get('classes')
    if given is not None:
        return _given_names(given, path)
    own = (getattr(find_class(DATASETS, dataset, scope), 'METAINFO', None) or {}).get('classes')
    return tuple(own) if own else folder_names(dataset, scope)


def folder_names(dataset: Mapping, scope: Optional[str]) -> Optional[Labels]:
    """The folders, in order, of a data set of mmpretrain's that takes its labels from them; None for others."""
    kind = find_class(DATASETS, dataset, scope)
    if not hasattr(kind, '_find_samples') or dataset.get('ann_file') or not dataset.get('with_label', True):
        return None
    split, prefix = dataset.get('split') or '', dataset.get('data_prefix') or ''
    if split == 'test':  # ImageNet's has no labels
        return None
    prefix = prefix.get('img_path', '') if isinstance(prefix, dict) else prefix
    root = Path(dataset.get('data_root') or '')
    if split and (root / 'meta' / f'{split}.txt').exists():
        return None
    folder = root / (prefix or split)
    return tuple(sorted(e.name for e in os.scandir(folder) if e.is_dir())) if folder.is_dir() else None


def shown(names: Sequence[str]) -> str:
    """Names for a message, not all if they are many."""
    names = tuple(names)
    return repr(names) if len(names) <= 20 else f'({", ".join(map(repr, names[:5]))}, ..., {names[-1]!r})'


def _named_datasets(
    cfg: Config, split: str, scope: Optional[str]
) -> Iterator[Tuple[str, Mapping, Labels, Optional[Labels]]]:
    """The data sets of a split whose classes are known and numbered, with their classes, and folders if they count."""
    loader = cfg.get(f'{split}_dataloader')
    for path, dataset in datasets(loader.get('dataset') if loader else None, f'{split}_dataloader.dataset'):
        # which has 13 classes of its own, of which mmdet evaluates the first alone
        tracks = type_name(dataset) == 'MOTChallengeDataset' and not dataset.get('metainfo')
        if not dataset.get('return_classes') and not tracks:
            names = class_names(dataset, scope, path)
            folders = folder_names(dataset, scope)
            if names and folders and len(names) != len(folders):
                raise ValueError(
                    f'{path} has {len(names)} classes, {shown(names)}, but {len(folders)} folders, {shown(folders)}, from which '
                    'it takes its labels. Set its metainfo=dict(classes=(...)) to one name for each folder, in their order.'
                )
            if names:
                yield path, dataset, names, folders


def _given_names(given: Any, path: str) -> Labels:
    if isinstance(given, str) and os.path.isfile(given):
        given = Path(given).read_text(encoding='utf-8').splitlines()
    if not isinstance(given, (list, tuple)) or not all(isinstance(name, str) for name in given):
        raise ValueError(
            f'{path}: classes={given!r} must be a sequence of names, or a file with one in each line. A single one is '
            "written as classes=('name', )."
        )
    twice = sorted(name for name, times in Counter(given).items() if times > 1)
    if twice:
        raise ValueError(f'{path}: classes={shown(given)} has {shown(twice)} more than once. Name each class once.')
    return tuple(given)


def _check_heads(cfg: Config, path: str, dataset: Mapping, names: Labels, scope: Optional[str]) -> None:
    metainfo = dataset.get('metainfo') or {}
    own = getattr(find_class(DATASETS, dataset, scope), 'METAINFO', None) or {}
    named_things = metainfo.get('thing_classes') or own.get('thing_classes') or names
    things = sum(name in named_things for name in names)  # in panoptic segmentation the other classes are stuff
    wanted = dict(num_classes=things, num_things_classes=things, num_stuff_classes=len(names) - things)
    found = list(_head_sizes(cfg.get('model'), 'model', scope))
    if isinstance(cfg.get('data_preprocessor'), dict):  # mmpretrain's makes one-hot labels for Mixup and CutMix
        found += _sizes(cfg.data_preprocessor, 'data_preprocessor', scope)
    wrong = [(key, value, wanted[key.rsplit('.', 1)[-1]]) for key, value in found]
    wrong = [each for each in wrong if each[1] != each[2]]
    if wrong:
        whose = '' if metainfo.get('classes') or dataset.get('classes') else f' of {type_name(dataset)} itself'
        stuff = f' ({things} things and {len(names) - things} of stuff)' if things != len(names) else ''
        raise ValueError(
            f'{", ".join(f"{key}={value}" for key, value, _ in wrong)}, but {path} has the {len(names)} classes{whose}{stuff} '
            f'{shown(names)}. Set {", ".join(f"{key}={right}" for key, _, right in wrong)} (--cfg-options), or, if the data has '
            'other classes, metainfo=dict(classes=(...)) in the data set of every data loader.'
        )


def _head_sizes(node: Any, path: str, scope: Optional[str]) -> Iterator[Tuple[str, int]]:
    """What the heads in a model's config say of their number of classes, with its keys."""
    if isinstance(node, (list, tuple)):
        for i, each in enumerate(node):
            yield from _head_sizes(each, f'{path}.{i}', scope)
    elif isinstance(node, dict):
        part = next(key for key in reversed(path.split('.')) if not key.isdigit())
        if part in _OTHERS:
            return
        if part.endswith('head') or part == 'data_preprocessor':
            yield from _sizes(node, path, scope)
        for key, value in node.items():
            yield from _head_sizes(value, f'{path}.{key}', scope)


def _sizes(node: Mapping, path: str, scope: Optional[str]) -> Iterator[Tuple[str, int]]:
    sizes = {key: node[key] for key in ('num_classes', 'num_things_classes', 'num_stuff_classes') if key in node}
    if not sizes and 'type' in node:
        sizes['num_classes'] = _default(find_class(MODELS, node, scope), 'num_classes')
    if path.endswith('semantic_head') or node.get('class_agnostic'):  # of stuff, and one mask for all classes
        sizes.pop('num_classes', None)
    for key, value in sizes.items():
        if isinstance(value, int):
            yield f'{path}.{key}', value


def _default(kind: Optional[Type], name: str) -> Any:
    """What an argument of ``kind`` is unless given: mmdet's box heads have 80 classes."""
    for each in inspect.getmro(kind) if inspect.isclass(kind) else ():
        parameters = inspect.signature(vars(each)['__init__']).parameters if '__init__' in vars(each) else {}
        if name in parameters:
            return parameters[name].default
    return None


def _check_same(path: str, names: Labels, other_path: str, others: Labels) -> None:
    if len(names) != len(others):
        raise ValueError(
            f'{other_path} has {len(others)} classes, {shown(others)}, but {path} {len(names)}, {shown(names)}. Both need '
            'the same classes in the same order: give them the same metainfo=dict(classes=(...)), or folders.'
        )
    differ = [i for i, (a, b) in enumerate(zip(names, others)) if a != b]
    swapped = [i for i in differ if names[i] in others or others[i] in names]
    if swapped:
        i = swapped[0]
        raise ValueError(
            f'label {i} is {others[i]!r} in {other_path} and {names[i]!r} in {path}, so that one would be taken for the other '
            f'({shown(others)}, {shown(names)}). Both need the same order: give them the same metainfo=dict(classes=(...)), or '
            'folders.'
        )
    if differ:
        print_log(
            f'{other_path} and {path} have other names for {len(differ)} of their {len(names)} labels, first '
            f'{others[differ[0]]!r} and {names[differ[0]]!r}: taken for the same classes.',
            logger='current',
            level=logging.WARNING,
        )

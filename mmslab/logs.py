"""mmengine's log with lines for people: what it says of each parameter by itself is said of groups."""

import logging
import re
from contextlib import contextmanager
from typing import Dict, Iterator, List

from mmengine.logging import MMLogger

_OPTION = re.compile(r'paramwise_options -- (.+?):(\w+)=(.*)')
_FROZEN = re.compile(r'(\S+) is skipped since its requires_grad=False')


class _PerParameter(logging.Filter):
    """Lowers to DEBUG, and keeps, what an optimizer's constructor says of single parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.options: Dict[str, List[str]] = {}
        self.frozen: List[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        option, frozen = _OPTION.fullmatch(text), _FROZEN.fullmatch(text)
        if option:
            self.options.setdefault(option[1], []).append(f'{option[2]}={option[3]}')
        if frozen:
            self.frozen.append(frozen[1])
        if option or frozen:
            record.levelno, record.levelname = logging.DEBUG, 'DEBUG'
        return True


@contextmanager
def grouped_parameters() -> Iterator[None]:
    """Within it, mmengine's constructors of optimizers log a line for each group of parameters with the same options.

    They log two or three lines for each parameter that ``paramwise_cfg`` says something of, and one for each that is not
    trained: hundreds. The group's line has its options, how many parameters it has and their names, with ``*`` for the
    numbers of layers. With ``log_level='DEBUG'`` the single lines are there too.
    """
    logger = MMLogger.get_current_instance()
    single = _PerParameter()
    logger.addFilter(single)
    try:
        yield
    finally:
        logger.removeFilter(single)
        groups: Dict[str, List[str]] = {}
        for name, options in single.options.items():
            groups.setdefault(', '.join(options), []).append(name)
        for options, names in groups.items():
            logger.info(f'paramwise options {options}: {len(names)} parameters, {_patterns(names)}')
        if single.frozen:
            logger.info(
                f'not trained (requires_grad=False): {len(single.frozen)} parameters, {_patterns(single.frozen)}'
            )


def _patterns(names: List[str]) -> str:
    return ', '.join(dict.fromkeys(re.sub(r'(?<=\.)\d+(?=\.|$)', '*', name) for name in names))

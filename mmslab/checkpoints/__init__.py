"""Loading weights that others published: the SLAB authors', those of the families they build on, OpenMMLab's Swin.

Published weights have names, :data:`RELEASES`. A checkpoint, by name or not, is read in three steps, each a function:
:func:`read_state_dict` (file to tensors),
:func:`canonical` (anyone's key names to ours), :func:`load_pretrained` (into a backbone, whatever its norms and
window sizes). Our names are Microsoft's Swin names (``patch_embed``, ``layers.0.blocks.0.attn.qkv``,
``layers.0.downsample``) in every family, with ``layers.0.pos_embed`` where there is one, and ``ln``, ``repbn.eta``,
``repbn.bn`` and ``gamma`` inside a PRepBN.
"""

from .convert import HEADS, convert
from .files import StateDict, load_file, locate, read_state_dict, use_safe_loading
from .fit import LoadReport, check_fits, load_pretrained
from .names import canonical
from .releases import RELEASES, Release, check_known

__all__ = [
    'HEADS',
    'RELEASES',
    'LoadReport',
    'Release',
    'StateDict',
    'canonical',
    'check_fits',
    'check_known',
    'convert',
    'load_file',
    'load_pretrained',
    'locate',
    'read_state_dict',
    'use_safe_loading',
]

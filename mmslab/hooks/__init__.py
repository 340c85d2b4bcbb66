"""mmengine hooks that move gamma and recalibrate the BN statistics."""

from .bn_recalibration import BNRecalibrationHook
from .gamma_decay import GammaDecayHook
from .progress import RichProgressHook

__all__ = ['BNRecalibrationHook', 'GammaDecayHook', 'RichProgressHook']

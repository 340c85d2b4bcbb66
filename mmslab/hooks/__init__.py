"""mmengine hooks that move gamma, recalibrate the BN statistics, and make resuming exact."""

from .bn_recalibration import BNRecalibrationHook
from .exact_resume import ExactResumeHook, latest_checkpoint
from .gamma_decay import GammaDecayHook
from .progress import RichProgressHook

__all__ = ['BNRecalibrationHook', 'ExactResumeHook', 'GammaDecayHook', 'RichProgressHook', 'latest_checkpoint']

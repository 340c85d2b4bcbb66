"""mmengine hooks that move gamma, watch the handover, recalibrate the BN statistics, and make resuming exact."""

from .bn_recalibration import BNRecalibrationHook
from .exact_resume import ExactResumeHook, latest_checkpoint
from .gamma_decay import GammaDecayHook
from .monitor import HandoverMonitorHook
from .progress import RichProgressHook

__all__ = [
    'BNRecalibrationHook',
    'ExactResumeHook',
    'GammaDecayHook',
    'HandoverMonitorHook',
    'RichProgressHook',
    'latest_checkpoint',
]

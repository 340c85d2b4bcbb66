"""The picture of gamma over a training, from GammaDecayHook itself."""

import io
from typing import Dict, List, Tuple

T, HOLD, NUM_STEPS = 0.6, 0.1, 6
POINTS = 600


def curves() -> Dict[str, Tuple[List[float], List[float]]]:
    """For each schedule the places in the training, from 0 to 1, and gamma there."""
    from mmslab.hooks.gamma_decay import OF_TIME, GammaDecayHook

    places = [i / POINTS for i in range(POINTS + 1)]
    hooks = {s: GammaDecayHook(T=T, hold=HOLD, schedule=s, num_steps=NUM_STEPS) for s in OF_TIME}
    return {name: (places, [hook.gamma_at(t, T, HOLD) for t in places]) for name, hook in hooks.items()}


def picture() -> str:
    """The curves as SVG, the same from one build to the next."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({'svg.hashsalt': 'mmslab', 'svg.fonttype': 'path'}):
        figure, ax = plt.subplots(figsize=(7, 3), layout='constrained')
        for (name, curve), style in zip(curves().items(), ('-', '--', '-')):
            ax.plot(*curve, style, label=name)
        ax.axvspan(HOLD + T, 1, color='tab:gray', alpha=0.12, lw=0)
        ax.annotate('RepBN alone', (HOLD + T + 0.01, 0.5), va='center', color='dimgray')
        ax.annotate('LayerNorm', (0.005, 1.02), va='bottom', color='dimgray')
        ax.set(xlabel='fraction of the training', ylabel='gamma', xlim=(0, 1), ylim=(-0.03, 1.12))
        ax.legend(loc='upper right')
        ax.grid(alpha=0.3)
        out = io.StringIO()
        figure.savefig(out, format='svg', metadata={'Date': None})
        plt.close(figure)
    return out.getvalue()

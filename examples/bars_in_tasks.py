"""Each task shows its own progress bar, below the bar of all tasks.

Run it in a terminal; needs tqdm.

    python examples/bars_in_tasks.py
"""

from __future__ import annotations

import argparse
import time

from tqdm import tqdm

from xpool import Pool


def train(fold: int) -> float:
    loss = 1.0
    for _ in tqdm(range(steps), desc=f"fold {fold}", unit="step"):
        time.sleep(0.02)
        loss *= 0.98
    print(f"fold {fold}: loss {loss:.3f}")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    with Pool(3) as pool:
        losses = pool.map(train, range(6), chunksize=1, progress="all folds")
    print(f"mean loss {sum(losses) / len(losses):.3f}")

"""How long the corruption suite takes: every corruption at its five severities, on many small images.

python benchmarks/shifts.py                  # 10,000 images of 32 x 32
python benchmarks/shifts.py --images 1000
"""

import argparse
import time

import torch
from torch.nn import functional as F

from caveat.data import CORRUPTIONS, shift


def blobs(count: int) -> torch.Tensor:
    """Blobs of colour, [count, 3, 32, 32] bytes."""
    coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return (F.interpolate(coarse, (32, 32), mode="bilinear") * 255).to(torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    images = blobs(parser.parse_args().images)
    for name in CORRUPTIONS:  # imports, threads and caches are not timed
        shift(images[:10], name, 1)
    print(f"{len(images):,} images, 5 severities, {torch.get_num_threads()} threads\n")
    print("| corruption | seconds |\n|---|---|")
    total = 0.0
    for name, found in CORRUPTIONS.items():
        start = time.perf_counter()
        for severity in found.severities:
            shift(images, name, severity)
        seconds = time.perf_counter() - start
        total += seconds
        print(f"| {name} | {seconds:.1f} |", flush=True)
    print(f"| all | {total:.0f} |")


if __name__ == "__main__":
    main()

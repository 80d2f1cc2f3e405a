"""Functions as workers: each estimates pi from its own random numbers, and the caller gets all the estimates."""

import os
import random

from holdfast import LaunchConfig, elastic_launch


def estimate_pi(samples: int) -> float:
    """What one worker runs. It learns from the environment which one it is, as a script would."""
    numbers = random.Random(int(os.environ["RANK"]))
    hits = sum(numbers.random() ** 2 + numbers.random() ** 2 < 1 for _ in range(samples))
    return 4 * hits / samples


def main() -> None:
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=4, rdzv_backend="standalone")
    estimates = elastic_launch(config, estimate_pi)(200_000)
    for rank, estimate in estimates.items():
        print(f"rank {rank}: {estimate:.4f}")
    print(f"together: {sum(estimates.values()) / len(estimates):.4f}")


if __name__ == "__main__":
    main()

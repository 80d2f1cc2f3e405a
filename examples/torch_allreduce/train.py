"""An all-reduce with torch: every worker brings its rank, and all of them get the sum."""

import torch
import torch.distributed as dist


def main() -> None:
    # Ranks, master address and port are in the environment, under the names that torch looks for.
    dist.init_process_group("gloo")
    value = torch.tensor([dist.get_rank()])
    dist.all_reduce(value)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the ranks add up to {value.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

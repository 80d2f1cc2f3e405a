#!/usr/bin/env bash
# A worker need not be Python: this one adds up every WORLD_SIZE-th number, beginning with its own rank.
set -euo pipefail

sum=0
for ((number = RANK; number <= $1; number += WORLD_SIZE)); do
    sum=$((sum + number))
done
echo "rank $RANK of $WORLD_SIZE: $sum"

"""The one benchmark suite: holdfast, torchrun and the bare limit, alternately, in one run (`make bench`)."""

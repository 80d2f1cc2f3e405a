"""Why did it fail, and why does it not move: evidence is gathered here and turned into one cause."""

"""Where the output of workers goes: files, console, the lines kept as evidence."""

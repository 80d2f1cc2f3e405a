"""What went wrong: the cause of a failed run in words, and the kernel's memory killer."""

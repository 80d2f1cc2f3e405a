"""`holdfast dashboard`: one page about one run, served to browsers by a process of its own."""

"""Reading a run: the views that commands and the dashboard show are made here."""

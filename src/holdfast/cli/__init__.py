"""The commands of holdfast, one module each, imported when it is chosen; `arguments` reads their command lines."""

"""One life of a worker group: starting, watching, stopping, and the evidence of failures."""

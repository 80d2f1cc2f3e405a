"""A fake world for the machines that decide: virtual time, a fake network, fake hosts, all driven by one seed."""

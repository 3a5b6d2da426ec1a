"""Which way answers a request soonest on this machine."""

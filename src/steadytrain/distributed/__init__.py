"""How the work of one update is spread: each engine passes the same conformance suite."""

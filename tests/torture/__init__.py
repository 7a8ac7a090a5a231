"""`make torture`: attacks on everything that reads or writes a file. See docs/security.md for what is promised."""

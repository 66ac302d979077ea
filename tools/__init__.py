"""What the tests and the Makefile need and the library does not."""
